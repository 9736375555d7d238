"""`medialane top` against a server with the state of a gateway."""

import asyncio
import contextlib
import io
import json
import time

import msgspec
import pytest
from aiohttp import web
from rich.console import Console

from medialane.cli.main import main
from medialane.cli.top import screen, sparkline
from medialane.core.errors import InvalidImage, StartupFailed, to_report
from medialane.core.media import MediaRef
from medialane.core.request import Endpoint, ModelCard, RoutingDecision, WorkerLoad
from medialane.core.stats import ArenaStats, PoolStats, StoreStats
from medialane.gateway import WorkerPool
from medialane.gateway.operators import own_part, whole_state
from medialane.gateway.operators.part import Whose
from medialane.gateway.operators.state import Limits, OwnView, store_view
from medialane.gateway.report import Sent
from medialane.gateway.requests import RecentRequests, RequestRecord

URL = "http://gateway:8000"


def store():
    arena = dict.fromkeys(ArenaStats.__struct_fields__, 0) | {
        "size_bytes": 1 << 30,
        "free_bytes": 1 << 29,
        "processed_bytes": 1 << 29,
    }
    pool = dict.fromkeys(PoolStats.__struct_fields__, 0) | {"num_alive": 4, "num_busy": 2, "num_queued": 7}
    return store_view(StoreStats(ArenaStats(**arena), PoolStats(**pool)), None, has_started=True)


def endpoint(name, **more):
    card = ModelCard("m", 10, 16, {}, num_kv_blocks=100, max_num_seqs=8)
    load = WorkerLoad(num_running=3, num_waiting=2, kv_usage=0.5)
    return Endpoint(name, name, **{"ready": True, "load": load, "num_in_flight": 0, "card": card, **more})


def record(name, *refs, error=None):
    made = RequestRecord()
    made.name(name)
    made.received(refs, model="m", streams=True)
    made.tenant, made.status = "acme [bold]", 200
    made.sending(Sent(RoutingDecision("gpu7/1", "idle")))
    made.sent_at(time.perf_counter() - 3)
    if error is not None:
        made.failed(to_report(error), quotes_client=False)
    return made


async def state(*endpoints, recent=None, others=(), own_store=None):
    parts = {
        "0": await own_part(recent or RecentRequests(), WorkerPool([]), Whose("0", 1, 0.0)),
        **dict.fromkeys(others),
    }
    return await whole_state(
        OwnView("1", "some/model", endpoints, {"gpu7/1": (5, 10)}, own_store), parts, "0", Limits()
    )


@pytest.fixture
async def busy():
    recent = RecentRequests()
    failed = record("failed", error=InvalidImage("not an image"))
    recent.begin(failed)
    failed.ended(is_disconnected=False)
    recent.end(failed)
    recent.begin(record("running-request", MediaRef("image", "a", url="http://slow.example/x")))
    return await state(
        endpoint("gpu7/1"), endpoint("gpu7/2", stalled=True), recent=recent, others=["1"], own_store=store()
    )


def shown(found, *, width=140, urls=(URL,), max_rows=20):
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    console.print(screen(urls, found, width=width, max_rows=max_rows))
    return out.getvalue()


@pytest.mark.parametrize("width", [140, 80, 40])
async def test_what_matters_is_shown_at_each_width(busy, width):
    text = shown([busy], width=width)
    for word in (
        "some/model",
        "gpu7/1",
        "stalled",
        "invalid_image",
        "running",
        "prefill",
        "gateway 1: does not answer",
    ):
        assert word in text
    assert all(len(line) <= width for line in text.splitlines())


async def test_names_are_not_read_as_markup(busy):
    assert "acme [bold]" in shown([busy])


async def test_idle_server_says_so():
    text = shown([await state()])
    for sentence in ("no requests are running", "no worker has joined", "no errors in the last", "takes no media"):
        assert sentence in text


async def test_workers_that_do_not_fit_are_counted():
    text = shown([await state(*[endpoint(f"gpu/{n}") for n in range(50)])], max_rows=10)
    assert "and 45 more: 50 ready in all" in text


async def test_gateway_that_does_not_answer_is_shown_beside_others(busy):
    text = shown([busy, StartupFailed("http://b: connection refused")], urls=(URL, "http://b"))
    assert "connection refused" in text
    assert "gpu7/1" in text


def test_sparkline_has_the_highest_of_each_share():
    assert sparkline([0, 0, 8, 0, None, 4], 3) == "▁█▅"
    assert sparkline([0] * 4, 2) == "▁▁"


@pytest.fixture
async def served(busy):
    """The URL of a server whose key is `admin`."""

    async def answer(request):
        if request.headers.get("authorization") != "Bearer admin":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response(body=msgspec.json.encode(busy))

    app = web.Application()
    app.router.add_get("/medialane/state", answer)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def top(*args):
    return await asyncio.to_thread(main, ["top", *args])


async def test_state_is_printed_once_as_json(served, capsys, monkeypatch):
    monkeypatch.setenv("MEDIALANE_ADMIN_KEY", "admin")
    assert await top("--gateway", served, "--once", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["url"], document["workers"]["num"]) == (served, 2)
    assert await top("--gateway", served, "--once") == 0
    assert "some/model" in capsys.readouterr().out


async def test_key_is_read_from_a_file(served, tmp_path, capsys):
    file = tmp_path / "key"
    file.write_text("admin\n")
    file.chmod(0o600)
    assert await top("--gateway", f"{served}/v1", "--once", "--admin-key-file", str(file)) == 0
    assert "some/model" in capsys.readouterr().out


async def test_missing_key_is_named(served, capsys):
    assert await top("--gateway", served, "--once") == 2
    assert "MEDIALANE_ADMIN_KEY" in capsys.readouterr().err


async def test_one_of_several_that_does_not_answer_is_an_exit_status(served, capsys, monkeypatch):
    monkeypatch.setenv("MEDIALANE_ADMIN_KEY", "admin")
    assert await top("--gateway", served, "--gateway", "http://127.0.0.1:9", "--once", "--json") == 2
    assert "error" in json.loads(capsys.readouterr().out)[1]


@pytest.mark.parametrize("args", [("--json",), ("--gateway", "ftp://x", "--once"), ("--interval", "0")])
def test_wrong_arguments_are_refused(args, capsys):
    with contextlib.suppress(SystemExit):  # of a usage error
        assert main(["top", *args]) == 2
    assert capsys.readouterr().err
