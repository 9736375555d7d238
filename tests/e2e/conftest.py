"""Real vLLM for whole requests: a plain server, and `medialane serve` with two workers, for the whole session.

Starting them takes a minute or two of both cores, so they start side by side, and all tests share them: tests that kill
processes wait until everything is up again, and the files' names put those that kill and stop last.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from medialane_process import MedialaneProcess
from openai_http import OpenAiHttp
from process_tree import command_of, descendants

from medialane.cli.plain_vllm import plain_vllm as start_plain_vllm
from medialane.vllm_bridge.tiny_model import TINY_MODEL_ENVIRON, TINY_MODEL_FLAGS

#: Tools are parsed as a user would have them parsed; usage tells of prefix cache hits.
SERVER_FLAGS = (
    *TINY_MODEL_FLAGS,
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--enable-prompt-tokens-details",
    "--trust-request-mm-kwargs",
    "--enable-mm-embeds",
)

#: Test pictures are served from the loopback interface.
MEDIALANE_FLAGS = ("--preparers", "2", "--arena-size", "256MiB", "--allow-media-network", "127.0.0.0/8")
API_KEY = "tested-key"


@pytest.fixture(scope="session")
def vllm_environ() -> dict[str, str]:
    """The whole environment of a process that runs vLLM."""
    # vLLM has its administrative routes in this mode only, in plain vLLM and in the gateway alike.
    return {**TINY_MODEL_ENVIRON, **os.environ, "VLLM_SERVER_DEV_MODE": "1"}


@pytest.fixture(scope="session")
def runtime_directory() -> Iterator[Path]:
    """Where `serve` puts its sockets: a short path, since theirs are bounded."""
    folder = Path(tempfile.mkdtemp(prefix="ml-e2e-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def starting_serve(tiny_model, vllm_environ, runtime_directory, tmp_path_factory) -> Iterator[MedialaneProcess]:
    """`medialane serve` with two workers, not ready yet: ask for `serve` instead."""
    process = MedialaneProcess.spawn(
        "serve",
        str(tiny_model),
        ["--workers", "2", "--verbose", *MEDIALANE_FLAGS],
        SERVER_FLAGS,
        environ={**vllm_environ, "XDG_RUNTIME_DIR": str(runtime_directory)},
        log=tmp_path_factory.mktemp("serve") / "serve.log",
    )
    yield process
    process.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def plain_vllm(starting_serve, tiny_model, vllm_environ, tmp_path_factory):
    """Plain vLLM with the tiny model: `base_url`, `model`. Its answers are the right ones."""
    log = tmp_path_factory.mktemp("plain_vllm") / "server.log"
    async with start_plain_vllm(str(tiny_model), SERVER_FLAGS, environ=vllm_environ, log=log) as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def serve(starting_serve, plain_vllm) -> MedialaneProcess:
    """`medialane serve` with two workers, ready."""
    await starting_serve.answers()
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
    commands = map(command_of, descendants(serve.pid))
    words = [command.split() for command in commands if "medialane worker" in command]
    return sorted(found[found.index("--listen") + 1] for found in words)


#: Gateways over the workers of `serve`, each with one way to hand over; `apart` has its arena where no worker looks.
GATEWAYS = {
    "features/shm": ("--stage", "features", "--transport", "shm"),
    "features/inline": ("--stage", "features", "--transport", "inline"),
    "decoded/shm": ("--stage", "decoded", "--transport", "shm"),
    "url": ("--stage", "url"),
    "apart": ("--transfer-max-inline-bytes", "1MiB"),
}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def gateways(serve, worker_addresses, vllm_environ, tmp_path_factory):
    """A client for each of GATEWAYS. The one of features/shm wants API_KEY."""
    apart = Path(tempfile.mkdtemp(prefix="ml-e2e-", dir="/dev/shm"))
    workers = [word for address in worker_addresses for word in ("--worker", address)]
    logs = tmp_path_factory.mktemp("gateways")
    own = {"features/shm": ["--api-key", API_KEY]}
    processes = {}
    try:
        for name, flags in GATEWAYS.items():
            directory = ["--arena-directory", str(apart)] if name == "apart" else []
            processes[name] = MedialaneProcess.spawn(
                "gateway",
                serve.model,
                [*workers, *flags, *directory, *MEDIALANE_FLAGS],
                [*SERVER_FLAGS, *own.get(name, ())],
                environ=vllm_environ,
                log=logs / f"{name.replace('/', '-')}.log",
            )
        for process in processes.values():
            await process.answers()
        yield {
            name: OpenAiHttp(process.base_url, process.model, api_key=API_KEY if name in own else "")
            for name, process in processes.items()
        }
    finally:
        for process in processes.values():
            process.process.terminate()
        for process in processes.values():
            process.stop()
        shutil.rmtree(apart)
