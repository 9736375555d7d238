"""Native functions come from disk where they can be kept, and are compiled again where they cannot."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import package.native_sum as found
print(found.total(3), sum(found.total.stats.cache_hits.values()))
"""
NATIVE = """
from medialane.core.compiled import compiled
from package.native_part import part
@compiled
def total(n):
    return part(n) + 1
"""
PART = """
from medialane.core.compiled import compiled
@compiled
def part(n):
    return n * FACTOR
"""


def write(folder, factor):
    (folder / "package").mkdir(exist_ok=True)
    (folder / "package" / "native_sum.py").write_text(NATIVE)
    (folder / "package" / "native_part.py").write_text(PART.replace("FACTOR", str(factor)))


def run(folder):
    """What the function says, and how often its machine code came from disk."""
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=dict(os.environ))
    total, hits = map(int, done.stdout.split())
    return total, hits


@pytest.mark.whole
def test_machine_code_is_cached_until_a_native_file_of_its_package_changes(tmp_path):
    write(tmp_path, factor=10)
    assert run(tmp_path) == (31, 0)
    assert run(tmp_path) == (31, 1)
    (tmp_path / "package" / "native_part.py").write_text(PART.replace("FACTOR", "20"))
    assert run(tmp_path) == (61, 0)  # numba alone would go on with what the other file said before


def test_functions_are_recompiled_if_the_cache_is_not_writable(tmp_path):
    write(tmp_path, factor=10)
    program = (
        "import sys, tempfile\n"
        "def refuse(*args, **kwargs): raise OSError(30, 'read-only file system')\n"
        "tempfile.TemporaryFile = refuse\n"
        "from numba.core.caching import CacheImpl\n"
        "CacheImpl._locator_classes = []\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import package.native_sum as found\n"
        "print(found.total(3))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "31"
    assert "NUMBA_CACHE_DIR" in done.stderr
