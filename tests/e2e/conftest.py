"""More servers over those of shared_servers.py, and the order of tests.

The gateways of GATEWAYS and the two hosts of test_e2e_hosts.py start while those tests run that need none. Tests that
kill processes come after all others, those of tests/clients too, and wait until everything is up again; then `serve`
is stopped.
"""

import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import shared_servers
from gateway_variants import ENDINGS, GATEWAYS
from medialane_process import MedialaneProcess, free_port, launch
from openai_http import OpenAiHttp
from shared_servers import MEDIA_FLAGS, SERVER_FLAGS, running_store_apart
from two_hosts import TwoHosts

from linked_hosts import linked_hosts
from otlp_collector import Collector, grpc_collector

API_KEY = "tested-key"

HERE = Path(__file__).parent
CLIENTS = HERE.parent / "clients"

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


def pytest_configure(config):
    shared_servers.add_to(config)


def pytest_collection_modifyitems(items):
    places = [number for number, item in enumerate(items) if item.path.parent in (HERE, CLIENTS)]
    for number, item in zip(places, sorted((items[n] for n in places), key=_turn), strict=True):
        items[number] = item


def _turn(item: pytest.Item) -> int:
    """When it runs. The first test is one of this folder, whose fixtures start all servers."""
    if item.path.stem in _LAST:
        return 3 + _LAST.index(item.path.stem)
    if item.path.parent == CLIENTS:
        return 2
    return int("gateways" in item.fixturenames)


@pytest.fixture(scope="session")
def encoder_address() -> Iterator[str]:
    """Where the encoder listens. It is killed, so that its socket stays."""
    folder = Path(tempfile.mkdtemp(prefix="ml-enc-", dir="/tmp"))  # pytest's own paths are too long for sockets
    yield f"unix:{folder}/encoder.sock"
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def worker_addresses(serve) -> list[str]:
    """Where the two workers listen."""
    return serve.worker_addresses()


APART = ("apart", "features/tcp", "decoded/tcp")
#: Records what it is asked.
RECORDING = "decoded/shm"
GATEWAYS_PROGRAM = Path(__file__).with_name("gateways_program.py")


@pytest.fixture(scope="session")
def store_apart(starting_serve, vllm_environ, tmp_path_factory) -> Iterator[list[str]]:
    """The flags of a gateway of another store."""
    log = tmp_path_factory.mktemp("store") / "store.log"
    with running_store_apart(starting_serve.model, environ=vllm_environ, log=log) as flags:
        yield flags


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
        has_key = name == "features/shm"  # and shares what is cached with the others, which have none
        key, shared = (["--api-key", API_KEY], ["--share-cache"]) if has_key else ([], [])
        places[name] = (free_port(), logs / f"{name.replace('/', '-')}.log")
        port, log = places[name]
        found = workers if name != "joined" else ["--join-listen", f"tcp://127.0.0.1:{join_port}"]
        found = [*found, "--worker", encoder_address] if name == "encoders" else found
        found = [*found, "--record", str(recording)] if name == RECORDING else found
        ours = [serve.model, "--port", str(port), *found, *flags, *shared, *store, *MEDIA_FLAGS]
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
