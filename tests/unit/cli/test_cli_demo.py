"""The demo compares, says so, and with --keep serves until Ctrl-C: here with servers that only record what is done."""

import asyncio
import json
import os
import re
import shlex
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from medialane.cli import demo
from medialane.tools.check import ServerProcess
from waiting import eventually, iterations

MODEL = "/cache/a model"
IMAGES = [b"1", b"2"]


class FakeServer:
    """Answers each question with the same tokens, and records when it starts, has answered all, and stops."""

    def __init__(self, name, done, token_ids=(1, 2)):
        self._name, self._done, self._token_ids = name, done, list(token_ids)
        self._num_answers = 0

    @asynccontextmanager
    async def __call__(self, model):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._done.append(f"{self._name} starts")
        try:
            yield ServerProcess(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", model, 1, None)
        finally:
            await runner.cleanup()
            self._done.append(f"{self._name} stops")

    async def _answer(self, request):
        asked = await request.json()
        self._num_answers += 1
        if self._num_answers == 5:
            self._done.append(f"{self._name} has answered")
        streams = asked.get("stream")
        text = {"role": "assistant", "content": "x"}
        choice = {"index": 0, "finish_reason": "stop", "token_ids": self._token_ids}
        answer = {"id": "1", "created": 0, "model": asked["model"]}
        headers = {"server-timing": "total;dur=3.0"}
        if streams:
            answer |= {"object": "chat.completion.chunk", "choices": [choice | {"delta": text}]}
            body = f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n"
            return web.Response(text=body, content_type="text/event-stream", headers=headers)
        return web.json_response(
            answer | {"object": "chat.completion", "choices": [choice | {"message": text}]}, headers=headers
        )


@pytest.fixture(autouse=True)
async def _client_loads_certificates():
    """OpenAI's client does when it is made: some ten milliseconds, or much longer on a busy machine."""
    asyncio.get_running_loop().slow_callback_duration = 10


@pytest.fixture
def done():
    """What the servers do, in order."""
    return []


def compared(done, *, keep=False, token_ids=(1, 2)):
    plain, ours = FakeServer("plain vLLM", done), FakeServer("medialane", done, token_ids)
    return demo.compared(IMAGES, lambda: Path(MODEL), plain=plain, ours=ours, keep=keep)


async def test_demo_asks_its_servers_past_a_proxy_of_the_environment(done, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert await compared(done) == 0


PLAIN = ["plain vLLM starts", "plain vLLM has answered", "plain vLLM stops"]


async def test_demo_compares_and_ends_with_lines_to_paste(done, capsys):
    assert await compared(done) == 0
    assert done == [*PLAIN, "medialane starts", "medialane has answered", "medialane stops"]
    shown, _, rest = capsys.readouterr().out.partition("token-identical: yes\n")
    assert "Ctrl-C" not in shown + rest
    assert f"\n  . {sys.prefix}/bin/activate\n" in rest
    command = shlex.split(rest.splitlines()[-1])
    assert command[:3] == ["medialane", "serve", MODEL]
    assert "--enforce-eager" in command


async def test_demo_fails_if_an_answer_differs(done, capsys):
    assert await compared(done, token_ids=(1, 3)) == 1
    assert "token-identical: no" in capsys.readouterr().out


async def test_demo_that_keeps_serving_compares_first_and_ends_at_once(done, capsys):
    running = asyncio.create_task(compared(done, keep=True))
    printed = []

    def all_printed():
        printed.append(capsys.readouterr().out)
        return "".join(printed)

    await eventually(lambda: "URL=" in all_printed())
    out = "".join(printed)
    assert "token-identical: yes" in out
    assert re.search(r"^  URL=http://127\.0\.0\.1:\d+ MODEL='/cache/a model'$", out, re.MULTILINE)
    assert done == [*PLAIN, "medialane starts", "medialane has answered"]
    await iterations(2)  # until the signal is awaited
    os.kill(os.getpid(), signal.SIGINT)
    async with asyncio.timeout(10):
        assert await running == 0
    assert done[5:] == ["medialane stops"]
