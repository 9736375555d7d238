"""Where machine code is kept, and that nothing is compiled once a router is made."""

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from medialane.core.block_hash import MediaSpan
from medialane.core.request import Endpoint, WorkerLoad
from medialane.routing import Router, RoutingConfig, RoutingRequest, compiled, native_choice, native_match, native_table

ENTRIES = [
    found
    for module in (native_choice, native_match, native_table)
    for found in vars(module).values()
    if isinstance(found, numba.core.dispatcher.Dispatcher)
    and found.py_func.__module__ == module.__name__
    and "no_cpython_wrapper" not in found.targetoptions
]


def test_nothing_is_compiled_after_a_router_was_made():
    router = Router(RoutingConfig(), seed=1)
    assert all(len(entry.signatures) == 1 for entry in ENTRIES), "each is warm, for one kind of arguments"
    for entry in ENTRIES:
        entry.disable_compile()
    try:
        for number in range(70):
            router.join(Endpoint(f"w{number}", "", True, WorkerLoad(), 0, same_host=number % 2 == 0))
        for number in range(300):
            ids = np.arange(number, dtype=np.uint64)
            media = tuple(MediaSpan(f"{number + item}", 0, 16) for item in range(number % 7))
            routed = router.pick(RoutingRequest(ids, 16, 16 * number, media, handover_bytes=number))
            routed.begin()
            router.index.store(number % 70, ids)
            routed.prefilled(None)
            routed.release()
            router.index.remove(number % 70, ids[number // 2 :])
        router.leave(3)
        router.index.sweep()
    finally:
        for entry in ENTRIES:
            entry.disable_compile(False)


def test_machine_code_is_kept_by_the_digest_of_what_it_is_made_of():
    folder = Path(compiled._folder())
    assert folder.name.startswith("native-")
    assert list(folder.rglob("*.nbi"))


def test_folder_that_cannot_be_written_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert not compiled._is_writable(tmp_path / "file" / "below")
    assert compiled._is_writable(tmp_path / "new" / "below")


def test_function_is_compiled_where_nothing_can_be_kept(monkeypatch, caplog):
    def refuse(**kwargs):
        if kwargs.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return numba.njit

    monkeypatch.setattr(compiled, "numba", type("Numba", (), {"njit": staticmethod(lambda *a, **k: _njit(*a, **k))}))

    def _njit(*args, **kwargs):
        return refuse(**kwargs)(*args) if args else refuse(**kwargs)

    compiled._tell_once.cache_clear()
    assert compiled._cached(_double)(4) == 8
    assert "each start compiles it anew" in caplog.text


def _double(number):
    return 2 * number


@pytest.mark.parametrize("module", ["medialane.prepare", "medialane.worker", "medialane.routing.config"])
def test_who_does_not_route_loads_no_numba(module):
    program = f"import sys, {module}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env=dict(os.environ)).returncode == 0
