"""Real vLLM for whole requests: a plain server, and `medialane serve` with two workers, for the whole session.

Starting them takes a minute of both cores, so they start side by side, and all tests share them. The gateways of
GATEWAYS and the two hosts of test_e2e_hosts.py start while those tests run that need none. Tests that kill processes
come after all others and wait until everything is up again; then `serve` is stopped. Files that need none of these run
beside the others, in a process of their own (`-n 2 --dist loadgroup`).
"""

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from medialane_process import (
    FORKING_VLLM,
    ONE_PROCESS_ENGINE,
    PING_S,
    START_S,
    STOP_S,
    MedialaneProcess,
    free_port,
    launch,
)
from openai_http import OpenAiHttp
from small_dummies import with_small_dummies
from two_hosts import TwoHosts
from xdist.scheduler import LoadScopeScheduling

from linked_hosts import linked_hosts
from medialane.check.server_process import plain_vllm as start_plain_vllm
from medialane.testing.tiny_model import TINY_MODEL_ENVIRON, TINY_MODEL_FLAGS
from otlp_collector import Collector, grpc_collector
from poison import PROGRAM
from waiting import eventually

#: Tool parsing as users enable it; usage includes prefix cache hits.
SERVER_FLAGS = (
    *TINY_MODEL_FLAGS,
    # In bfloat16, several tokens are often as probable, and which one is first depends on how a prompt is prefilled.
    "--dtype=float32",
    with_small_dummies({"image": 8, "video": 1}),
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--enable-prompt-tokens-details",
    "--trust-request-mm-kwargs",
    "--enable-mm-embeds",
    "--enable-scale-out",
    # Five engines run at the same time on a machine of 24 GB.
    f"--kv-cache-memory-bytes={256 << 20}",
)

#: Test images are served from the loopback interface.
MEDIA_FLAGS = ("--allow-media-network", "127.0.0.0/8")
STORE_FLAGS = ("--preparers", "2", "--arena-size", "256MiB", *MEDIA_FLAGS)
LOG_FLAGS = ("--log-format", "json", "--access-log")
API_KEY = "tested-key"

#: Files that run last, in this order.
_LAST = (
    "test_e2e_migration",
    "test_e2e_essential_tasks",
    "test_e2e_hosts",
    "test_e2e_processes_killed",
    "test_e2e_stop",
    "test_e2e_ray",
    "test_plain_vllm",
)


#: Files with servers of their own.
_ALONE = ("test_e2e_mistral", "test_e2e_render", "test_e2e_serve_gateways")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """All files that share servers in one process (`--dist loadgroup` itself needs node ids that pytest 9 has not)."""
    if config.getvalue("dist") != "loadgroup":
        return None

    class ByServers(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "alone" if Path(nodeid.partition("::")[0]).stem in _ALONE else "shared servers"

    return ByServers(config, log)


def pytest_collection_modifyitems(items):
    places = [number for number, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    for number, item in zip(places, sorted((items[n] for n in places), key=_turn), strict=True):
        items[number] = item


def _turn(item: pytest.Item) -> int:
    if item.path.stem in _LAST:
        return 2 + _LAST.index(item.path.stem)
    return int("gateways" in item.fixturenames)


@pytest.fixture(scope="session")
def vllm_environ() -> dict[str, str]:
    """The whole environment of a process that runs vLLM."""
    # vLLM has its administrative routes only in this mode, both plain and in the gateway.
    found = {**TINY_MODEL_ENVIRON, **os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    del found["VLLM_CPU_KVCACHE_SPACE"]  # it would override the flag in SERVER_FLAGS
    return found


@pytest.fixture(scope="session")
def server_flags() -> tuple[str, ...]:
    """vLLM's flags of all servers."""
    return SERVER_FLAGS


@pytest.fixture(scope="session")
def runtime_directory() -> Iterator[Path]:
    """Where `serve` and its engines create their sockets: a short path, since theirs are bounded."""
    folder = Path(tempfile.mkdtemp(prefix="ml-e2e-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def encoder_address() -> Iterator[str]:
    """Where the encoder listens. It is killed, so that its socket stays."""
    folder = Path(tempfile.mkdtemp(prefix="ml-enc-", dir="/tmp"))  # pytest's own paths are too long for sockets
    yield f"unix:{folder}/encoder.sock"
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def join_port() -> int:
    """Where the workers of `serve` join the gateway `joined`. They try for a minute before it listens."""
    return free_port()


@pytest.fixture(scope="session")
def metrics_port() -> int:
    """Where the first worker of `serve` has its metrics; the second one has the next port."""
    return free_port(2)


@pytest.fixture(scope="session")
def starting_serve(
    tiny_model, vllm_environ, runtime_directory, tmp_path_factory, join_port, metrics_port
) -> Iterator[MedialaneProcess]:
    """`medialane serve` with two workers, not ready yet: use the fixture `serve` instead. Its store overwrites what it
    frees."""
    joining = ["--join", f"localhost:{join_port}", "--metrics-port", str(metrics_port)]
    process = MedialaneProcess.spawn(
        "serve",
        str(tiny_model),
        ["--workers", "2", "--verbose", *LOG_FLAGS, "--worker-ping-interval", str(PING_S), *STORE_FLAGS, *joining],
        SERVER_FLAGS,
        environ={
            **vllm_environ,
            "XDG_RUNTIME_DIR": str(runtime_directory),
            "VLLM_RPC_BASE_PATH": str(runtime_directory),
        },
        log=tmp_path_factory.mktemp("serve") / "serve.log",
        program=[str(PROGRAM)],
    )
    yield process
    process.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def plain_vllm(request, tiny_model, vllm_environ, tmp_path_factory):
    """Plain vLLM with the tiny model: `base_url`, `model`. The reference for outputs."""
    if any("starting_serve" in item.fixturenames for item in request.session.items):
        request.getfixturevalue("starting_serve")  # side by side
    log = tmp_path_factory.mktemp("plain_vllm") / "server.log"
    flags = (*SERVER_FLAGS, ONE_PROCESS_ENGINE)
    async with start_plain_vllm(str(tiny_model), flags, environ=vllm_environ, log=log, program=FORKING_VLLM) as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def serve(request, starting_serve, plain_vllm) -> MedialaneProcess:
    """`medialane serve` with two workers, all of them ready: before, the exit of one would fail the start."""
    await starting_serve.answers()
    await eventually(lambda: "Ctrl-C stops it" in starting_serve.log.read_text(), "all workers are ready", START_S)
    needed = {name for item in request.session.items for name in item.fixturenames}
    if "starting_gateways" in needed:
        request.getfixturevalue("starting_gateways")
    if "starting_hosts" in needed:
        with suppress(pytest.skip.Exception):  # the tests that use them are skipped
            request.getfixturevalue("starting_hosts")
    return starting_serve


@pytest.fixture(scope="session")
def ours(serve) -> OpenAiHttp:
    """A client of medialane."""
    return OpenAiHttp(serve.base_url, serve.model)


@pytest.fixture(scope="session")
def plain(plain_vllm) -> OpenAiHttp:
    """A client of plain vLLM."""
    return OpenAiHttp(plain_vllm.base_url.removesuffix("/v1"), plain_vllm.model)


@pytest.fixture(scope="session")
def worker_addresses(serve) -> list[str]:
    """Where the two workers listen."""
    return serve.worker_addresses()


#: Gateways over the workers and the store of `serve`, each with one transfer path. Those of APART have a store of their
#: own, with an arena out of the workers' reach, as on another host: the store of `serve` copies from it.
#: `joined` lists no workers: they join it. It has a queue and a limit of the time to first token, to measure both.
#: `encoders` has an encoder, besides, which the tests of encoders start.
GATEWAYS = {
    "features/shm": ("--stage", "features", "--transport", "shm"),
    "features/inline": ("--stage", "features", "--transport", "inline"),
    "decoded/shm": ("--stage", "decoded", "--transport", "shm"),
    "url": ("--stage", "url", "--no-page"),
    "apart": ("--transport", "inline", "--transfer-max-inline-bytes", "1MiB"),
    "features/tcp": ("--stage", "features", "--transport", "tcp"),
    "decoded/tcp": ("--stage", "decoded", "--transport", "tcp"),
    "joined": ("--gateway-queue-requests", "1000", "--gateway-ttft-limit", "600"),
    "encoders": ("--encode-at", "encoders"),
}
#: What the last test of them ends in a gateway (gateways_program.py).
ENDINGS = {"url": "links", "features/inline": "server"}
APART = ("apart", "features/tcp", "decoded/tcp")
#: Records what it is asked.
RECORDING = "decoded/shm"
GATEWAYS_PROGRAM = Path(__file__).with_name("gateways_program.py")


@pytest.fixture(scope="session")
def store_apart(starting_serve, vllm_environ, tmp_path_factory) -> Iterator[list[str]]:
    """The flags of a gateway of another store, whose arena is in a folder that no worker knows, and from which other
    stores may copy."""
    folder = Path(tempfile.mkdtemp(prefix="ml-e2e-", dir="/dev/shm"))
    address, directory = f"unix:{folder}/store.sock", ["--arena-directory", str(folder)]
    medialane = [sys.executable, "-m", "medialane", "store", starting_serve.model, "--listen", address]
    process = launch(
        [*medialane, *STORE_FLAGS, *directory, "--peer-listen", "tcp://127.0.0.1:0", "--", *SERVER_FLAGS],
        environ=vllm_environ,
        log=tmp_path_factory.mktemp("store") / "store.log",
    )
    yield ["--store", address, *directory]
    process.terminate()
    assert process.wait(STOP_S) == 0
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def recording(tmp_path_factory) -> Path:
    """What the gateway RECORDING records."""
    return tmp_path_factory.mktemp("recording") / "traffic.jsonl"


@pytest.fixture(scope="session")
def starting_gateways(
    starting_serve, store_apart, vllm_environ, tmp_path_factory, join_port, encoder_address, recording
) -> Iterator[dict[str, MedialaneProcess]]:
    """GATEWAYS, not ready yet: use the fixture `gateways` instead. Children of one process, which `stop` ends."""
    serve = starting_serve
    workers = [word for address in serve.worker_addresses() for word in ("--worker", address)]
    logs = tmp_path_factory.mktemp("gateways")
    commands, places = [], {}
    for name, flags in GATEWAYS.items():
        store = store_apart if name in APART else ["--store", serve.store_address]
        key = ["--api-key", API_KEY] if name == "features/shm" else []
        places[name] = (free_port(), logs / f"{name.replace('/', '-')}.log")
        port, log = places[name]
        found = workers if name != "joined" else ["--join-listen", f"tcp://127.0.0.1:{join_port}"]
        found = [*found, "--worker", encoder_address] if name == "encoders" else found
        found = [*found, "--record", str(recording)] if name == RECORDING else found
        ours = [serve.model, "--port", str(port), *found, *flags, *store, *MEDIA_FLAGS]
        commands.append([str(log), [*ours, "--", *SERVER_FLAGS, *key], ENDINGS.get(name)])
    process = launch(
        [sys.executable, str(GATEWAYS_PROGRAM), json.dumps(commands)],
        environ={**vllm_environ, "VLLM_MEDIA_CONNECTOR": "medialane"},  # as the command sets it before it imports vLLM
        log=logs / "program.log",
    )
    started = {name: MedialaneProcess(process, port, serve.model, log) for name, (port, log) in places.items()}
    yield started
    started["apart"].stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def gateways(serve, starting_gateways) -> dict[str, OpenAiHttp]:
    """A client for each of GATEWAYS. That of features/shm requires API_KEY."""
    for process in starting_gateways.values():
        await process.answers()
    return {
        name: OpenAiHttp(process.base_url, process.model, api_key=API_KEY if name == "features/shm" else "")
        for name, process in starting_gateways.items()
    }


@pytest.fixture(scope="session")
def network():
    """As root, with NIXL; elsewhere the tests of two hosts are skipped."""
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("NOT TESTED: vLLM on two hosts, since NIXL is not installed (the extra nixl)")
    with linked_hosts(2, here=True) as found:
        yield found


@pytest.fixture(scope="session")
def collector(network) -> Iterator[Collector]:
    """What gateways and workers of two hosts export their spans to."""
    with grpc_collector(network.addresses[0]) as collector:
        yield collector


@pytest.fixture(scope="session")
def starting_hosts(network, collector, tiny_model, vllm_environ, tmp_path_factory) -> Iterator[TwoHosts]:
    """Not ready yet: use the fixture `gateways` of test_e2e_hosts.py instead."""
    logs = tmp_path_factory.mktemp("hosts")
    flags = (*SERVER_FLAGS, "--otlp-traces-endpoint", collector.endpoint)
    environ = {**vllm_environ, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    hosts = TwoHosts(network, model=str(tiny_model), flags=flags, media=MEDIA_FLAGS, environ=environ, logs=logs)
    yield hosts
    hosts.close()
