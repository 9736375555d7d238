"""Options of the fuzz tests: duration, seed, or a single input to reproduce."""

from __future__ import annotations

from pathlib import Path

import pytest

SECONDS, SEED = 15.0, 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seconds", type=float, default=SECONDS, help="how long all fuzz targets take together")
    parser.addoption("--fuzz-seed", type=int, default=SEED, help="another seed makes other inputs")
    parser.addoption("--fuzz-input", type=Path, help="run the targets that -k chooses on this file alone")


@pytest.fixture
def fuzz_seconds(pytestconfig: pytest.Config) -> float:
    # The defaults are for runs that load this folder only during collection.
    return pytestconfig.getoption("--fuzz-seconds", default=SECONDS)


@pytest.fixture
def fuzz_seed(pytestconfig: pytest.Config) -> int:
    return pytestconfig.getoption("--fuzz-seed", default=SEED)


@pytest.fixture
def fuzz_input(pytestconfig: pytest.Config) -> Path | None:
    return pytestconfig.getoption("--fuzz-input", default=None)
