"""A server that single requests end is started again, within a limit."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from medialane.tools.check import CaseRequest, CheckClient, CheckProgress
from medialane.tools.check.servers import MAX_STARTS, RevivedServer
from medialane.types.errors import StartupFailed

DEADLY, FAILING = CaseRequest("/ask", {"is": "deadly"}), CaseRequest("/ask", {"is": "failing at first"})


class Mortal:
    """Like vLLM, it answers 500 to the request that ends its engine, and is not healthy any more."""

    def __init__(self):
        self.num_running = self.num_started = 0
        self.numbers = []

    @asynccontextmanager
    async def start(self, number):
        dead, asked = asyncio.Event(), []

        async def ask(request):
            what = (await request.json())["is"]
            asked.append(what)
            if what == "deadly":
                dead.set()
            fails = what == "deadly" or (what != "fine" and asked.count(what) == 1)
            return web.json_response({}, status=500 if fails else 200)

        async def health(_request):
            return web.Response(status=503 if dead.is_set() else 200)

        async def models(_request):
            return web.json_response({"data": [{"id": "m"}]})

        app = web.Application()
        app.add_routes([web.post("/ask", ask), web.get("/health", health), web.get("/v1/models", models)])
        self.num_started += 1
        self.numbers.append(number)
        self.num_running += 1
        try:
            async with (
                TestServer(app) as server,
                CheckClient.opened(str(server.make_url("")).rstrip("/")) as client,
            ):
                yield client
        finally:
            self.num_running -= 1


def opened(mortal, **options):
    return RevivedServer("plain vLLM", mortal.start, CheckProgress(Console(quiet=True)), settle_s=0.0, **options)


async def test_server_that_a_request_ends_answers_the_next_one():
    mortal = Mortal()
    async with opened(mortal) as server:
        assert (await server.post(DEADLY)).status == 500
        assert (await server.post(CaseRequest("/ask", {"is": "fine"}))).status == 200
        assert (mortal.num_started, mortal.num_running) == (2, 1)
    assert mortal.num_running == 0
    assert mortal.numbers == [1, 2]


async def test_server_that_fails_and_goes_on_is_not_started_again():
    mortal = Mortal()
    async with opened(mortal) as server:
        assert (await server.post(FAILING)).status == 500
    async with opened(mortal, asks_again=True) as server:
        assert (await server.post(FAILING)).status == 200
    assert mortal.num_started == 2, "once each"


async def test_server_that_ends_again_and_again_is_given_up():
    mortal = Mortal()
    async with opened(mortal) as server:
        for _ in range(MAX_STARTS - 1):
            await server.post(DEADLY)
        with pytest.raises(StartupFailed, match=f"plain vLLM has ended {MAX_STARTS} times"):
            await server.post(DEADLY)
    assert (mortal.num_started, mortal.num_running) == (MAX_STARTS, 0)
