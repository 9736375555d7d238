"""`medialane doctor --request` against a server with the answers of a gateway."""

import asyncio
import json

import pytest
from aiohttp import web

from medialane.cli import main
from medialane.cli.request_steps import TEXTS, Timing
from medialane.observability import STEPS, RequestTimeline

HEADER = "upload;dur=1.00, parse;dur=2.00, store;dur=4.00, decode;dur=3.00, response;dur=1.00, "
HEADER += 'cache;desc="miss", copied;desc="7", total;dur=8.10'


class FakeGateway:
    """Serves the model `vision` to whoever has its key, if it has one."""

    def __init__(self):
        self.key, self.takes_images, self.timing = "", True, HEADER
        self.asked = []

    async def start(self):
        app = web.Application(middlewares=[self._checked], client_max_size=10 << 20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self):
        await self._runner.cleanup()

    @web.middleware
    async def _checked(self, request, handler):
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no"}}, status=401)
        return await handler(request)

    async def _models(self, _request):
        return web.json_response({"data": [{"id": "vision"}]})

    async def _answer(self, request):
        body = await request.json()
        self.asked.append(body)
        if len(body["messages"][0]["content"]) > 1 and not self.takes_images:
            return web.json_response({"error": {"message": "it has no eyes"}}, status=400)
        return web.json_response({"choices": []}, headers={"server-timing": self.timing} if self.timing else {})


@pytest.fixture
async def gateway():
    gateway = FakeGateway()
    gateway.url = await gateway.start()
    yield gateway
    await gateway.close()


async def doctor(*words):
    """`main` runs an event loop of its own."""
    return await asyncio.to_thread(main, ["doctor", *words])


async def test_table_has_the_steps_in_order_with_share_and_sentence(gateway, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert await doctor("--request", gateway.url) == 0
    text, _, image = capsys.readouterr().out.partition("new image")
    for table in (text, image):
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines()]
        found = {row[0]: row[1:] for row in rows if len(row) == 4}
        assert [name for name in found if name in STEPS] == ["upload", "parse", "store", "decode", "response"]
        assert found["parse"] == ["2.0", "24.7%", TEXTS["parse"]]
        assert found["decode"][:2] == ["3.0", ""], "a part of another step"
        assert found["all"][:2] == ["8.0", "98.8%"]
    sent = [[part["type"] for part in body["messages"][0]["content"]] for body in gateway.asked]
    assert sent == [["text"], ["image_url", "text"]]


async def test_json_has_what_the_table_has(gateway, capsys):
    assert await doctor("--request", gateway.url, "--json") == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["total_ms"] == 8.1
    assert second["steps_ms"] == {"upload": 1, "parse": 2, "store": 4, "decode": 3, "response": 1}
    assert first["client_ms"] > 0


async def test_model_without_images_is_no_error(gateway, capsys):
    gateway.takes_images = False
    assert await doctor("--request", gateway.url) == 0
    assert "refused: it has no eyes" in capsys.readouterr().out


async def test_key_is_the_one_of_the_environment(gateway, capsys, monkeypatch):
    gateway.key = "secret"
    assert await doctor("--request", gateway.url) == 2
    assert "needs the key of a client: set VLLM_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert await doctor("--request", gateway.url) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["blind", "--request", "URL"], "does not serve blind, but vision"),
        (["--request", "http://127.0.0.1:1"], "no gateway answers at http://127.0.0.1:1: Connection refused"),
        (["--request", "127.0.0.1:1"], "127.0.0.1:1: not a URL such as"),
        (["--request", "--port", "1"], "no gateway answers at http://127.0.0.1:1: "),
        (["--request", "URL", "--join", "host:1"], "leave out --join"),
    ],
)
async def test_what_is_wrong_is_said(gateway, capsys, words, message):
    assert await doctor(*(word.replace("URL", gateway.url) for word in words)) == 2
    assert message in capsys.readouterr().err


async def test_other_servers_are_told_apart(gateway, capsys):
    gateway.timing = ""
    assert await doctor("--request", gateway.url) == 2
    assert "no Server-Timing" in capsys.readouterr().err


def test_every_step_has_a_sentence_and_is_read_from_the_header():
    assert tuple(TEXTS) == STEPS
    timeline = RequestTimeline()
    for step in STEPS:
        timeline.enter(step)
    timing = Timing.of(timeline.server_timing())
    assert tuple(timing.steps_ms) == STEPS
    assert timing.described == {"cache": "none", "copied": "0"}
