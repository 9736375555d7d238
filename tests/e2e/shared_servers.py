"""Real vLLM for whole requests: a plain server, and `medialane serve` with two workers, for the whole session.

Starting them takes a minute of both cores, so they start side by side, and all tests share them: those of this folder
and of tests/clients, whose conftest.py each add this module as a plugin. Files that need none of these run beside the
others, in a process of their own (`-n 2 --dist loadgroup`).
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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
from xdist.scheduler import LoadScopeScheduling

from medialane.testing.tiny_model import TINY_MODEL_ENVIRON, TINY_MODEL_FLAGS
from medialane.tools.check import plain_vllm as start_plain_vllm
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

#: Files with servers of their own.
_ALONE = (
    "test_clients_audio",
    "test_e2e_adapters",
    "test_e2e_mistral",
    "test_e2e_render",
    "test_e2e_serve_gateways",
    "test_e2e_working_directory",
)


def add_to(config: pytest.Config) -> None:
    """Make the fixtures of this module known to all tests, unless they are."""
    if not config.pluginmanager.has_plugin(__name__):
        config.pluginmanager.register(sys.modules[__name__], __name__)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """All files that share servers in one process (`--dist loadgroup` itself needs node ids that pytest 9 has not)."""
    if config.getvalue("dist") != "loadgroup":
        return None

    class ByServers(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "alone" if Path(nodeid.partition("::")[0]).stem in _ALONE else "shared servers"

    return ByServers(config, log)


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


@contextmanager
def running_store_apart(model: str, *, environ: Mapping[str, str], log: Path) -> Iterator[list[str]]:
    """A store whose arena is in a folder that no worker knows, and from which other stores may copy; the flags of its
    gateways."""
    folder = Path(tempfile.mkdtemp(prefix="ml-e2e-", dir="/dev/shm"))
    address, directory = f"unix:{folder}/store.sock", ["--arena-directory", str(folder)]
    medialane = [sys.executable, "-m", "medialane", "store", model, "--listen", address]
    flags = [*STORE_FLAGS, *directory, "--peer-listen", "tcp://127.0.0.1:0", "--", *SERVER_FLAGS]
    process = launch([*medialane, *flags], environ=environ, log=log)
    try:
        yield ["--store", address, *directory]
    finally:
        process.terminate()
        status = process.wait(STOP_S)
        shutil.rmtree(folder)
    assert status == 0


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
