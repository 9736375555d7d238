"""Two gateways on one port, as `serve --gateways 2` starts them, over a simulated worker: no engine is needed."""

import asyncio
import json
import os
import shutil
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from medialane_process import START_S
from openai_http import CHAT, OpenAiHttp, both_gateways_answer, chat, picture
from process_tree import arenas_of

from host_state import as_before, state_of, store_link
from medialane.cluster import Supervisor, local, running
from medialane.cluster.placement import Hardware
from medialane.config import load_config
from medialane.vllm_bridge.tiny_model import TINY_MODEL_FLAGS
from poison import poisoned_store
from process_ends import ProcessEnds
from waiting import eventually

pytestmark = pytest.mark.vllm

#: Answers take ten seconds: longer than it takes to kill a gateway, shorter than it takes to start one.
NUM_TOKENS = 200
SIMULATED = ("--engine", "simulated", "--simulated-step-ms", "50", "--simulated-prefill-token-ms", "0")


class Served:
    """The supervised processes, a client of the shared port, and a connection to the store."""

    def __init__(self, supervisor, log, client, store):
        self.supervisor, self.log, self.client, self.store = supervisor, log, client, store

    async def answer(self):
        """The number of chunks with a token of a long answer about an image. Raises aiohttp.ClientError."""
        body = {"model": self.client.model, **chat(picture(1), max_tokens=NUM_TOKENS, stream=True, ignore_eos=True)}
        num_tokens = 0
        async with aiohttp.ClientSession() as session, session.post(self.client.base_url + CHAT, json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    num_tokens += sum(len(c.get("token_ids") or ()) for c in json.loads(line[6:])["choices"])
        return num_tokens

    async def state(self):
        """Includes which gateways are up, and what the worker runs."""
        page = await self.client.metrics()
        names = ("medialane_gateway_up", "medialane_worker_running")
        return await state_of(os.getpid(), self.store, *map(page.value, names))


@pytest.fixture
async def served(tiny_model, vllm_environ):
    folder = Path(tempfile.mkdtemp(prefix="ml-e2e-", dir="/tmp"))  # a short path, for sockets
    settings = {"gateways": "2", "stage": "features", "preparers": "1", "arena-size": "64MiB", "port": "0"}
    config, hardware, log = local.with_port(load_config(settings, environ={})), Hardware((), 2), ProcessEnds()
    with local.shared_listener(config, hardware) as listener:
        parts = local.parts(
            config,
            str(tiny_model),
            TINY_MODEL_FLAGS,
            folder=folder,
            hardware=hardware,
            environ=vllm_environ,
            listener=listener,
        )
        parts = [
            replace(part, argv=(*part.argv[: part.argv.index("--")], *SIMULATED))
            if part.argv[3] == "worker"
            else replace(part, argv=poisoned_store(part.argv))
            for part in parts
        ]
        client = OpenAiHttp(local.base_url(config, []), str(tiny_model))
        async with (
            running(Supervisor(parts, config=config.cluster, logs=folder, observer=log)) as supervisor,
            store_link(f"unix:{folder}/store.sock") as store,
        ):
            yield Served(supervisor, log, client, store)
    shutil.rmtree(folder)


async def on_both(served):
    """Start answers until both gateways have some in flight. Returns their tasks and the number of each gateway's."""
    answers = []

    async def started():
        answers.append(asyncio.create_task(served.answer()))
        await eventually(lambda: in_flight(len(answers)), "it is in flight", 30)
        return all((await served.client.by_gateway("medialane_worker_in_flight")).values())

    async def in_flight(number):
        return sum((await served.client.by_gateway("medialane_worker_in_flight")).values()) == number

    await eventually(started, "both gateways have answers in flight", 60)
    return answers, await served.client.by_gateway("medialane_worker_in_flight")


async def test_killed_gateway_costs_its_own_requests_only(served):
    arenas = arenas_of(served.supervisor.pids["store"])
    killed = served.supervisor.pids["gateway 0"]
    async with as_before(served.state, START_S):
        answers, in_flight = await on_both(served)
        os.kill(killed, signal.SIGKILL)
        for _ in range(4):  # while it restarts, the other one gets all connections
            await served.client.succeed(chat(picture(2), max_tokens=2))
        assert await served.client.by_gateway("medialane_gateway_up") == {"0": 0, "1": 1}
        results = await asyncio.gather(*answers, return_exceptions=True)
        assert sum(isinstance(result, aiohttp.ClientError) for result in results) == in_flight["0"]
        assert [r for r in results if not isinstance(r, aiohttp.ClientError)] == [NUM_TOKENS] * int(in_flight["1"])
    assert served.log.ends == [("gateway 0", "killed by SIGKILL")]
    assert served.supervisor.pids["gateway 0"] != killed
    await both_gateways_answer(served.client)
    assert arenas_of(served.supervisor.pids["store"]) == arenas
