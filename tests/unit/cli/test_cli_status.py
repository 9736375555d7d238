"""`medialane status` against a server with the pages of a gateway."""

import asyncio
import json
import socket

import msgspec
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from medialane.cli import main
from medialane.cli.status import GatewayUp, Host, Link, parse_state, read_state, worker_host
from medialane.gateway import Health
from medialane.observability import Metrics, store_metrics
from medialane.types.errors import StartupFailed
from medialane.types.request import Endpoint, WorkerLoad
from medialane.types.stats import ArenaStats, EmbeddingStats, PoolStats, StoreStats

URL = "http://gateway:8000"


def endpoint(name, *, ready=True, **rest):
    return Endpoint(name, name, ready=ready, load=WorkerLoad(1, 2, 0.25), num_in_flight=3, **rest)


def store_stats():
    arena = dict.fromkeys(ArenaStats.__struct_fields__, 0) | {"size_bytes": 1 << 30, "free_bytes": 1 << 29}
    pool = dict.fromkeys(PoolStats.__struct_fields__, 0) | {"num_alive": 2, "queue_s": 0.0}
    return StoreStats(ArenaStats(**arena), PoolStats(**pool))


def page(*endpoints, store=None, memory=None):
    """`/metrics` of a gateway, as it exports them."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.watch_workers(lambda: endpoints)
    metrics.watch(lambda: store_metrics(store))
    if memory is not None:
        metrics.watch_memory(lambda: {"gateway": 3 << 20}, lambda: memory)
    return generate_latest(registry)


async def test_memory_is_shown_by_kind_of_process(serve, capsys):
    memory = [({}, {"store": 1 << 20}), *(({"worker": name}, {"engine": 2 << 20}) for name in ("a", "b"))]
    url = await serve(metrics=page(endpoint("a"), endpoint("b"), memory=memory))
    assert await status("--gateway", url) == 0
    line = "memory (proportional share, without the arena): engine 4 MiB, gateway 3 MiB, store 1 MiB\n"
    assert line in capsys.readouterr().out
    assert await status("--gateway", url, "--json") == 0
    assert json.loads(capsys.readouterr().out)["memory"] == {"engine": 4 << 20, "gateway": 3 << 20, "store": 1 << 20}


async def test_embeddings_of_the_store_are_shown(serve, capsys):
    stats = store_stats()
    arena = msgspec.structs.replace(stats.arena, embedded_bytes=3 << 20)
    stats = StoreStats(arena, stats.preparers, embeddings=EmbeddingStats(num_found=7, num_filled=4))
    url = await serve(metrics=page(endpoint("host-a/0"), store=stats))
    assert await status("--gateway", url) == 0
    assert "embeddings: 3 MiB; 4 stored and 7 found since the store's start" in capsys.readouterr().out


def test_state_has_workers_links_and_store():
    state = parse_state(URL, b"", page(endpoint("host-a/0"), endpoint("host-b/1"), store=store_stats()))
    assert (state.health, state.is_well) == ("ok", True)
    assert state.hosts() == [Host("host-a", 1, 1, "none"), Host("host-b", 1, 1, "none")]
    assert state.gateways == (GatewayUp("0", True),)
    assert state.links == (Link("0", "host-a/0", True, 3, "inline"), Link("0", "host-b/1", True, 3, "inline"))
    first = state.workers[0]
    assert (first.num_running, first.num_waiting, first.kv_usage) == (1, 2, 0.25)
    assert (state.store.size_bytes, state.store.free_bytes, state.store.num_preparers) == (1 << 30, 1 << 29, 2)
    assert state.connected_workers() == {"host-a/0", "host-b/1"}


@pytest.mark.parametrize(
    ("flags", "store"), [({"same_host": True}, "gateway's"), ({"can_pull": True}, "own"), ({"ready": False}, "")]
)
def test_host_has_the_store_from_which_its_workers_get_media(flags, store):
    (host,) = parse_state(URL, b"", page(endpoint("host-a/0", **flags))).hosts()
    assert host.store == store


def test_ranks_of_a_worker_are_one_worker():
    state = parse_state(URL, b"", page(endpoint("host-a/0"), endpoint("host-a/0", rank=1)))
    assert len(state.workers) == len(state.links) == 1


def test_encoders_are_shown_with_their_role_and_are_not_workers_of_the_host():
    encoder = endpoint("host-a/1", role="encoder", same_host=True)
    state = parse_state(URL, b"", page(endpoint("host-a/0", same_host=True), encoder))
    assert [worker.role for worker in state.workers] == ["worker", "encoder"]
    assert state.hosts() == [Host("host-a", 1, 1, "gateway's")]
    assert state.is_well


def test_lost_worker_is_not_well():
    health = Health("degraded", ("1 of 2 workers are ready",)).response()[1]
    state = parse_state(URL, health, page(endpoint("host-a/0"), endpoint("host-b/1", ready=False)))
    assert (state.health, state.problems, state.is_well) == ("degraded", ("1 of 2 workers are ready",), False)
    assert state.connected_workers() == {"host-a/0"}


GROUP = b"""
medialane_request_seconds_count{gateway="0"} 0.0
medialane_gateway_up{gateway="0"} 1.0
medialane_gateway_up{gateway="1"} %d
medialane_worker_connected{gateway="0",worker="host-a/0"} 1.0
medialane_worker_connected{gateway="1",worker="host-a/0"} %d
medialane_worker_state{worker="host-a/0",state="ready"} 1.0
"""


@pytest.mark.parametrize(("up", "connected"), [(1, 1), (0, 1), (1, 0)])
def test_every_gateway_of_the_port_must_respond_and_be_connected(up, connected):
    state = parse_state(URL, b"", GROUP % (up, connected))
    assert state.is_well == (up == connected == 1)
    assert bool(state.connected_workers()) == bool(connected)
    assert [gateway.up for gateway in state.gateways] == [True, bool(up)]


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("host-a/0", "host-a"),
        ("host-a:1234", "host-a"),
        ("host-a:1234/7", "host-a"),
        ("host-a/encoder-1", "host-a"),
        ("10.0.0.2:7000", "10.0.0.2"),
        ("tcp://10.0.0.2:7000", "10.0.0.2"),
        ("tcp://[fd00::2]:7000", "fd00::2"),
        ("unix:/run/medialane/worker-0.sock", ""),
        ("blue", "blue"),
    ],
)
def test_host_is_that_of_the_name(name, host):
    assert worker_host(name) == host


@pytest.fixture
async def serve():
    """Serve these pages, from another thread's point of view: `main` runs an event loop of its own."""
    runners = []

    async def start(health=b"", metrics=b"", *, status=200, key=None):
        app = web.Application()

        async def answer(request):
            if (
                key is not None
                and request.path == "/metrics"
                and request.headers.get("authorization") != f"Bearer {key}"
            ):
                return web.Response(status=401)
            return web.Response(body=health if request.path == "/health" else metrics, status=status)

        app.router.add_get("/{page}", answer)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def status(*words):
    return await asyncio.to_thread(main, ["status", *words])


async def test_tables_show_everything_and_the_status_is_0_if_all_is_well(serve, capsys):
    url = await serve(metrics=page(endpoint("host-a/0"), store=store_stats()))
    assert await status("--gateway", f"{url}/v1") == 0
    shown = capsys.readouterr().out
    assert all(
        word in shown for word in (f"{url}: ok", "host-a", "1 of 1", "host-a/0", "25%", "store: 1 GiB, 50% free")
    )


@pytest.mark.parametrize("name", ["metrics-key", "admin-key"])
async def test_key_of_the_metrics_comes_from_file_or_environment(serve, capsys, tmp_path, monkeypatch, name):
    url = await serve(metrics=page(endpoint("host-a/0")), key="let-me-in")
    assert await status("--gateway", url) == 2
    assert "needs a key: set MEDIALANE_METRICS_KEY, or --metrics-key-file" in capsys.readouterr().err
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text("let-me-in\n")
    assert await status("--gateway", url, f"--{name}-file", str(file)) == 0
    monkeypatch.setenv("MEDIALANE_" + name.upper().replace("-", "_"), "let-me-in")
    assert await status("--gateway", url) == 0
    monkeypatch.setenv("MEDIALANE_" + name.upper().replace("-", "_"), "guess")
    assert await status("--gateway", url) == 2
    assert "does not accept this key" in capsys.readouterr().err


async def test_problems_are_shown_and_the_status_is_1(serve, capsys):
    health = Health("degraded", ("0 of 1 workers are ready",)).response()[1]
    url = await serve(health, page(endpoint("host-a/0", ready=False)))
    assert await status("--gateway", url) == 1
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("degraded", "0 of 1 workers are ready", "lost", "store: not connected"))


async def test_json_has_the_same(serve, capsys):
    url = await serve(metrics=page(endpoint("host-a/0")))
    assert await status("--gateway", url, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["health"], found["store"]) == (True, "ok", None)
    assert found["workers"][0] | {"name": "host-a/0", "host": "host-a", "ready": True} == found["workers"][0]


async def test_gateways_of_several_hosts_are_shown_together(serve, capsys):
    urls = [await serve(metrics=page(endpoint(name, ready=name == "a/0"))) for name in ("a/0", "b/1")]
    assert await status("--gateway", urls[0], "--gateway", urls[1], "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [(each["url"], each["ok"]) for each in found] == [(urls[0], True), (urls[1], False)]
    assert [host["name"] for each in found for host in each["hosts"]] == ["a", "b"]


async def test_size_of_the_store_is_for_people(serve, capsys):
    """The arena is whole pages, not whole GiB."""
    stats = store_stats()
    arena = msgspec.structs.replace(stats.arena, size_bytes=2097148 << 10, free_bytes=2097148 << 9)
    url = await serve(metrics=page(endpoint("host-a/0"), store=StoreStats(arena, stats.preparers)))
    assert await status("--gateway", url) == 0
    assert "store: 2 GiB, 50% free" in capsys.readouterr().out


async def test_gateway_that_is_not_there_is_one_clear_error(capsys):
    assert await status("--gateway", "http://127.0.0.1:1") == 2
    assert capsys.readouterr().err == "medialane: error: no gateway answers at http://127.0.0.1:1: Connection refused\n"


@pytest.mark.parametrize("flags", [[], ["--json"]])
async def test_one_of_several_gateways_that_is_not_there_does_not_hide_the_others(serve, capsys, flags):
    url = await serve(metrics=page(endpoint("host-a/0")))
    assert await status("--gateway", "http://127.0.0.1:1", "--gateway", url, *flags) == 2
    shown = capsys.readouterr().out
    assert "no gateway answers at http://127.0.0.1:1: " in shown
    assert "host-a/0" in shown


@pytest.mark.parametrize(
    ("pages", "reason"),
    [
        ({"status": 404}, "is not a gateway: /health has status 404"),
        ({"metrics": b"up 1\n"}, "have no medialane_... series"),
        ({"metrics": b"<html>"}, "cannot be parsed"),
        ({"health": b"<html>"}, "cannot be parsed"),
    ],
)
async def test_other_servers_are_refused(serve, pages, reason):
    with pytest.raises(StartupFailed, match=reason):
        await read_state(await serve(**pages))


async def test_what_is_no_url_is_refused():
    with pytest.raises(StartupFailed, match="localhost:8000: not a URL such as http://"):
        await read_state("localhost:8000")


async def test_gateway_that_does_not_answer_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StartupFailed, match=r"has not answered within 0\.1 s"):
            await read_state(url, timeout_s=0.1)


def test_state_of_several_models_is_refused_with_what_to_add():
    page = (
        b'# TYPE medialane_model_up gauge\nmedialane_model_up{model_name="a"} 1\nmedialane_model_up{model_name="b"} 0\n'
    )
    with pytest.raises(StartupFailed, match=r"has several models \(a, b\): add one to its URL: http://h:1\?model=a"):
        parse_state("http://h:1", b"", page)
