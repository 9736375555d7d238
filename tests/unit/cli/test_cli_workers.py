"""`medialane workers` against a server with the administrative interface of a gateway."""

import asyncio
from urllib.parse import unquote

import msgspec
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from medialane.cli import main
from medialane.gateway import WorkerInfo
from medialane.observability import Metrics
from medialane.types.request import Endpoint, WorkerLoad

NAMES = ("node1/0", "node1/1")
KEY = "let-me-in"


class FakeGateway:
    """Its workers go through these states after a drain, one per question; the last one is a new run if it is ready."""

    def __init__(self, names, after=("draining", "lost", "ready"), key=None):
        self.workers = {name: WorkerInfo(name, "worker", "ready", "run-1", 3) for name in names}
        self.drained = []
        self.reloaded = {}
        self.num_ready = []  # at each drain
        self._after, self._key = after, key
        self._coming = {name: [] for name in names}
        registry = CollectorRegistry()
        Metrics(registry).watch_workers(lambda: [_endpoint(each) for each in self.workers.values()])
        self._registry = registry

    def app(self):
        app = web.Application()
        app.router.add_get("/medialane/workers", self._list)
        app.router.add_post("/medialane/reload", self._reload)
        app.router.add_post("/medialane/workers/{name:.+}/drain", self._drain)
        app.router.add_get("/health", self._answer_health)
        app.router.add_get("/metrics", self._answer_metrics)
        return app

    async def _list(self, request):
        if not self._is_admitted(request):
            return web.Response(status=401)
        for name, states in self._coming.items():
            if states and name in self.workers:
                state = states.pop(0)
                run = {"lost": "", "ready": "run-2"}.get(state, "run-1")
                self.workers[name] = msgspec.structs.replace(self.workers[name], state=state, run=run)
        return web.Response(body=msgspec.json.encode(list(self.workers.values())))

    async def _drain(self, request):
        if not self._is_admitted(request):
            return web.Response(status=401)
        name = unquote(request.match_info["name"])
        self.num_ready.append(sum(worker.state == "ready" for worker in self.workers.values()))
        self.drained.append(name)
        self._coming[name] = list(self._after)
        return web.Response(body=msgspec.json.encode(self.workers[name]))

    async def _reload(self, _request):
        return web.json_response(self.reloaded)

    async def _answer_health(self, _request):
        return web.Response()

    async def _answer_metrics(self, _request):
        return web.Response(body=generate_latest(self._registry))

    def _is_admitted(self, request):
        return self._key is None or request.headers.get("authorization") == f"Bearer {self._key}"


def _endpoint(worker):
    return Endpoint(worker.name, worker.name, ready=worker.state == "ready", load=WorkerLoad(), num_in_flight=0)


@pytest.fixture
async def serve():
    runners = []

    async def start(gateway):
        runner = web.AppRunner(gateway.app())
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def workers(*words):
    return await asyncio.to_thread(main, ["workers", *words])


async def drain(*words):
    return await workers("drain", *words)


async def test_workers_are_listed_with_the_gateways_that_do_not_reach_them(serve, capsys):
    gateway = FakeGateway(NAMES)
    gateway.workers[NAMES[1]] = msgspec.structs.replace(gateway.workers[NAMES[1]], unreachable_from=["1"])
    url = await serve(gateway)
    assert await workers("list", "--gateway", url) == 0
    assert "node1/1" in capsys.readouterr().out
    assert await workers("list", "--json", "--gateway", url) == 0
    shown = msgspec.json.decode(capsys.readouterr().out)
    assert [(each["name"], each["unreachable_from"]) for each in shown] == [(NAMES[0], []), (NAMES[1], ["1"])]


async def test_reload_shows_what_has_changed_and_which_gateways_have_not_answered(serve, capsys):
    gateway = FakeGateway(NAMES)
    gateway.reloaded = {
        "changed": ["--log-level"],
        "files": ["--keys"],
        "gateways_missing": ["1"],
    }
    assert await asyncio.to_thread(main, ["reload", "--gateway", await serve(gateway)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "changed: --log-level",
        "files read again: --keys",
        "gateway 1 has not read its settings again: see its log",
    ]


async def test_worker_is_drained_and_awaited(serve, capsys):
    gateway = FakeGateway(NAMES)
    url = await serve(gateway)
    assert await drain("node1/0", "--gateway", f"{url}/v1") == 0
    assert gateway.drained == ["node1/0"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["node1/0: draining, 3 requests", "node1/0: stopped"]
    assert lines[-1].startswith("node1/0: ready again after")


async def test_all_workers_are_drained_one_after_the_other(serve):
    gateway = FakeGateway(NAMES)
    assert await drain("--all", "--gateway", await serve(gateway)) == 0
    assert gateway.drained == list(NAMES)
    assert gateway.num_ready == [2, 2]


async def test_worker_that_does_not_come_back_ends_the_restart(serve, capsys):
    gateway = FakeGateway(NAMES, after=["draining", "lost"])
    assert await drain("--all", "--timeout", "0.5", "--gateway", await serve(gateway)) == 1
    assert gateway.drained == ["node1/0"]
    said = capsys.readouterr().out
    assert "node1/0: not back after 0.5 s" in said
    assert "not drained: node1/1" in said


async def test_without_waiting_the_command_ends_when_the_worker_has_stopped(serve, capsys):
    gateway = FakeGateway(NAMES, after=["draining", "lost"])
    assert await drain("node1/0", "--no-wait", "--gateway", await serve(gateway)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "node1/0: stopped"


async def test_only_worker_is_drained_with_a_warning(serve, capsys):
    assert await drain("node1/0", "--gateway", await serve(FakeGateway(NAMES[:1]))) == 0
    assert "node1/0 is the only worker that is ready" in capsys.readouterr().out


async def test_unknown_worker_is_answered_with_the_names_of_all(serve, capsys):
    gateway = FakeGateway(NAMES)
    assert await drain("node1/7", "--gateway", await serve(gateway)) == 2
    assert "no worker named node1/7; the workers of this gateway are: node1/0, node1/1" in capsys.readouterr().err
    assert gateway.drained == []


async def test_admin_key_is_needed_where_there_is_one(serve, capsys, tmp_path):
    gateway = FakeGateway(NAMES, key=KEY)
    url = await serve(gateway)
    assert await drain("node1/0", "--gateway", url) == 2
    assert "needs a key for administrative calls: set MEDIALANE_ADMIN_KEY" in capsys.readouterr().err
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    assert await drain("node1/0", "--gateway", url, "--admin-key-file", str(file)) == 0


async def test_gateway_that_does_not_answer_is_named(unused_tcp_port, capsys):
    url = f"http://127.0.0.1:{unused_tcp_port}"
    assert await drain("node1/0", "--gateway", url) == 2
    assert f"no gateway answers at {url}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--all", "node1/0"], ["--all", "--no-wait"], ["a", "b", "--no-wait"]])
async def test_contradicting_words_are_refused(words, capsys):
    assert await drain(*words) == 2
    assert "medialane: error: " in capsys.readouterr().err
