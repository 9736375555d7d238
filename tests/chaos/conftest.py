"""Settings of a run, and folders for `medialane serve`."""

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaotic_serve import spawn
from medialane_process import MedialaneProcess


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-seed", type=int, default=None, help="of the scenario; 0 is a random one")
    parser.addoption("--chaos-minutes", type=float, default=None, help="how long each scenario runs")


@pytest.fixture(scope="session")
def chaos_seed(request: pytest.FixtureRequest) -> int | None:
    """None: the tests' own."""
    seed: int | None = request.config.getoption("--chaos-seed")
    return random.SystemRandom().randrange(1, 1 << 30) if seed == 0 else seed


@pytest.fixture(scope="session")
def chaos_s(request: pytest.FixtureRequest) -> float | None:
    """None: the tests' own."""
    minutes: float | None = request.config.getoption("--chaos-minutes")
    return None if minutes is None else 60 * minutes


@pytest.fixture(scope="module")
def shared_memory() -> Iterator[Path]:
    """The folder of the arenas."""
    folder = Path(tempfile.mkdtemp(prefix="ml-chaos-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def runtime_directory() -> Iterator[Path]:
    """Where `serve` has its sockets: a short path, since theirs are bounded."""
    folder = Path(tempfile.mkdtemp(prefix="ml-chaos-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def serving(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    shared_memory: Path,
    runtime_directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[MedialaneProcess]:
    """`medialane serve` with the module's ENGINE_KIND and FLAGS."""
    process = spawn(
        tiny_model,
        engine=request.module.ENGINE_KIND,
        flags=request.module.FLAGS,
        shared_memory=shared_memory,
        runtime_directory=runtime_directory,
        log=tmp_path_factory.mktemp("chaos") / "serve.log",
    )
    yield process
    process.stop()
