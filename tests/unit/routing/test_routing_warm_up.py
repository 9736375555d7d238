"""Nothing is compiled once a router is made."""

import os
import subprocess
import sys

import numba
import numpy as np
import pytest

from medialane.core.feature import MediaSpan
from medialane.core.request import Endpoint, ModelCard, WorkerLoad
from medialane.routing import Router, RoutingConfig, RoutingRequest, native_choice, native_match, native_table

ENTRIES = [
    found
    for module in (native_choice, native_match, native_table)
    for found in vars(module).values()
    if isinstance(found, numba.core.dispatcher.Dispatcher)
    and found.py_func.__module__ == module.__name__
    and "no_cpython_wrapper" not in found.targetoptions
]


def test_nothing_is_compiled_after_router_construction():
    router = Router(RoutingConfig(), seed=1)
    assert all(len(entry.signatures) == 1 for entry in ENTRIES), "each is warm, for one kind of arguments"
    for entry in ENTRIES:
        entry.disable_compile()
    try:
        for number in range(70):
            card = ModelCard("m", 4096, 16 << number % 2, {})
            router.join(Endpoint(f"w{number}", "", True, WorkerLoad(), 0, same_host=number % 2 == 0, card=card))
        for number in range(300):
            ids = np.arange(number, dtype=np.uint64)
            media = tuple(MediaSpan(f"{number + item}", 0, 16) for item in range(number % 7))
            others = {32: ids[: number // 2].copy()} if number % 3 else {}
            asked = RoutingRequest(ids, 16, 16 * number, media, handover_bytes=number, other_block_ids=others)
            routed = router.pick(asked)
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


@pytest.mark.parametrize(
    "module",
    [
        "medialane.prepare",
        "medialane.routing.config",
        "medialane.config",
        "medialane.core.block_hash",
        "medialane.worker.block_reports",
    ],
)
def test_process_without_routing_does_not_import_numba(module):
    program = f"import sys, {module}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env=dict(os.environ)).returncode == 0
