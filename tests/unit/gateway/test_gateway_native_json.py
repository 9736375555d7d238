"""Compiled loops come from disk where they can be kept, and are compiled again where they cannot."""

import subprocess
import sys

import pytest

USE = """
import numpy as np
from medialane.gateway.intake import native_json
counts = np.zeros(native_json.NUM_COUNTS, np.int64)
native_json.scan(np.frombuffer(b'{"a": [1, 2]}', np.uint8), counts)
print(counts[native_json.DEPTH], sum(native_json.scan.stats.cache_hits.values()))
"""
#: As on a read-only file system.
NO_CACHE = """
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []
"""

pytestmark = pytest.mark.timeout(60)  # it compiles


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)


def test_machine_code_is_compiled_once():
    run(USE)
    assert run(USE).stdout.split() == ["2", "1"]


def test_functions_are_compiled_in_each_process_if_no_cache_is_writable():
    done = run(NO_CACHE + USE)
    assert done.stdout.split() == ["2", "0"]
    assert "NUMBA_CACHE_DIR" in done.stderr
