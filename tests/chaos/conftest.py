"""`medialane serve` with the tiny model and real vLLM, one for all tests of this folder, and a load for each test."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from medialane_process import START_S, MedialaneProcess
from openai_http import OpenAiHttp
from served_processes import FLAGS, SERVER_FLAGS, ServedProcesses

from medialane.testing.tiny_model import TINY_MODEL_ENVIRON
from poison import PROGRAM
from waiting import eventually


@pytest.fixture(scope="session")
def shared_memory() -> Iterator[Path]:
    """The folder of the arenas, which is empty in the end."""
    folder = Path(tempfile.mkdtemp(prefix="ml-chaos-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def runtime_directory() -> Iterator[Path]:
    """Where `serve` has its sockets: a short path, since theirs are bounded."""
    folder = Path(tempfile.mkdtemp(prefix="ml-chaos-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def serving(tiny_model, shared_memory, runtime_directory, tmp_path_factory) -> Iterator[MedialaneProcess]:
    """Its store overwrites what it frees."""
    process = MedialaneProcess.spawn(
        "serve",
        str(tiny_model),
        ["--workers", "1", "--verbose", *FLAGS, "--arena-directory", str(shared_memory)],
        SERVER_FLAGS,
        environ={**TINY_MODEL_ENVIRON, **os.environ, "XDG_RUNTIME_DIR": str(runtime_directory)},
        log=tmp_path_factory.mktemp("chaos") / "serve.log",
        program=[str(PROGRAM)],
    )
    yield process
    process.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def processes(serving) -> ServedProcesses:
    await serving.answers()
    await eventually(lambda: "Ctrl-C stops it" in serving.log.read_text(), "all are ready", START_S, more=serving.tail)
    return ServedProcesses(serving)


@pytest.fixture
def client(processes, serving) -> OpenAiHttp:
    return OpenAiHttp(serving.base_url, serving.model)
