"""`serve --workers 2 --gateways 2` under load, over simulated workers: all workers are restarted by `medialane drain
--all`, then both gateways and the store by SIGTERM, and no request is lost."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import aiohttp
import pytest
from medialane_process import START_S, free_port, launch
from openai_http import OpenAiHttp, chat, picture, text
from process_tree import command_of, descendants, is_alive

from medialane.testing.tiny_model import TINY_MODEL_FLAGS
from waiting import eventually

pytestmark = pytest.mark.vllm

PROGRAM = Path(__file__).with_name("serve_simulated_program.py")
READY = "Ctrl-C stops it"
DRAIN_S = 4
FLAGS = (
    *("--workers", "2", "--gateways", "2", "--stage", "features", "--preparers", "1", "--arena-size", "64MiB"),
    *("--drain-timeout", str(DRAIN_S), "--prepare-queue-timeout", "200"),
)
#: At 50 ms a token, answers take a second; the long ones take longer than a drain.
SHORT, LONG = 20, 160


class Load:
    """Clients that ask one question after the other, on connections that are kept alive."""

    def __init__(self, client):
        self._client = client
        self.is_over = False
        self.answers, self.failures = {}, []
        self._tasks = []

    def start(self, *, short, long=0):
        self._tasks = [asyncio.create_task(self._ask(n, SHORT)) for n in range(short)]
        self._tasks += [asyncio.create_task(self._ask(n, LONG)) for n in range(short, short + long)]

    async def stop(self):
        self.is_over = True
        await asyncio.gather(*self._tasks)

    async def _ask(self, number, max_tokens):
        content = (text(f"Question {number}"), *((picture(number),) if number % 2 else ()))
        body = chat(*content, max_tokens=max_tokens, stream=True, ignore_eos=True)
        async with self._client.session() as session:
            while not self.is_over:
                self.answers.setdefault(number, []).append(await self._answer(session, body))

    async def _answer(self, session, body):
        ids, finish = [], None
        try:
            body = {**body, "model": self._client.model}
            async with session.post(f"{self._client.base_url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    self.failures.append(await response.text())
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            self.failures.append(event)
                        for choice in event.get("choices", ()):
                            ids += choice.get("token_ids") or ()
                            finish = choice["finish_reason"] or finish
        except aiohttp.ClientError as error:
            self.failures.append(repr(error))
        return (*ids, finish)

    def check(self):
        assert not self.failures, self.failures
        for answers in self.answers.values():
            assert set(answers) == {answers[0]}
            assert len(answers[0]) > SHORT


@pytest.fixture
async def served(tiny_model, vllm_environ, tmp_path):
    """The process, and a client."""
    with tempfile.TemporaryDirectory(prefix="ml-e2e-", dir="/tmp") as folder:
        port, log = free_port(), tmp_path / "serve.log"
        process = launch(
            [sys.executable, str(PROGRAM), str(tiny_model), "--port", str(port), *FLAGS, "--", *TINY_MODEL_FLAGS],
            environ={**vllm_environ, "XDG_RUNTIME_DIR": folder},
            log=log,
        )
        try:
            await eventually(lambda: READY in log.read_text(), "it is ready", START_S, more=log.read_text)
            yield process, OpenAiHttp(f"http://127.0.0.1:{port}", str(tiny_model))
        finally:
            process.terminate()
            status = await asyncio.to_thread(process.wait, 60)
        assert status == 0, log.read_text()
        assert not os.listdir(folder)


def restart(process, title):
    """Ask the process with this title to stop. Returns its id."""
    (pid,) = [pid for pid in descendants(process.pid) if title in command_of(pid)]
    os.kill(pid, signal.SIGTERM)
    return pid


async def test_workers_are_restarted_under_load_and_no_request_is_lost(served):
    _, client = served
    load = Load(client)
    load.start(short=4, long=2)
    await eventually(lambda: len(load.answers) == 6, "all have been answered", 60)
    draining = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "medialane", "drain", "--all", "--gateway", client.base_url),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await draining.communicate()
    await load.stop()
    assert draining.returncode == 0, output
    assert output.count(b"ready again after") == 2
    load.check()
    page = await client.metrics()
    assert page.value("medialane_migrations_total", reason="worker_draining", outcome="continued")
    assert not page.value("medialane_worker_losses_total")


async def test_gateways_and_store_are_restarted_under_load_and_no_request_is_lost(served):
    process, client = served
    load = Load(client)
    load.start(short=4)
    await eventually(lambda: len(load.answers) == 4, "all have been answered", 60)
    for title in ("medialane gateway 0", "medialane gateway 1", "medialane store"):
        stopped = restart(process, title)
        await eventually(lambda pid=stopped: not is_alive(pid), f"{title} has stopped", 30)
        await eventually(lambda: _is_whole(client), f"{title} is back", 120)
    await load.stop()
    load.check()


async def _is_whole(client):
    """Whether both gateways serve, with a store."""
    page = await client.metrics()
    return page.value("medialane_gateway_up") == 2 and page.value("medialane_arena_bytes")
