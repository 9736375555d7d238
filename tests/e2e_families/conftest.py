"""Options of the comparison of families with plain vLLM, and the environment of its servers."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from medialane.testing.tiny_model import TINY_MODEL_ENVIRON


def pytest_addoption(parser):
    parser.addoption(
        "--reports", type=Path, metavar="FOLDER", help="send the whole matrix, and write each family's report here"
    )


@pytest.fixture(scope="session")
def reports(request) -> Path | None:
    """Where the reports are to be written, if they are."""
    folder = request.config.getoption("--reports", default=None)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def environ() -> Iterator[dict[str, str]]:
    """The whole environment of all processes. Sockets go to a short path, since theirs are bounded."""
    runtime = Path(tempfile.mkdtemp(prefix="ml-fam-"))
    yield {**TINY_MODEL_ENVIRON, **os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    shutil.rmtree(runtime)
