"""Hosts in network namespaces, for tests: as the benchmarks have them."""

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMESPACES = Path(__file__).parents[1] / "benchmarks" / "namespaces.py"


@contextmanager
def linked_hosts(number: int, *, here: bool = False) -> Iterator[Any]:
    """As root; elsewhere the tests are skipped. Arguments and result are as in `namespaces.hosts`."""
    spec = importlib.util.spec_from_file_location("namespaces", NAMESPACES)
    namespaces = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(namespaces)
    with ExitStack() as stack:
        try:
            found = stack.enter_context(namespaces.hosts(number, here=here))
        except OSError as error:
            pytest.skip(f"NOT TESTED: several hosts, since network namespaces cannot be created here: {error}")
        yield found
