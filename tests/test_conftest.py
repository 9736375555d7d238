"""The checks on every test fail a test that leaks."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PREAMBLE = """
import asyncio, mmap, time
from pathlib import Path
HELD = []
"""

CASES = {
    "leaked_task": (
        "async def test_it():\n    HELD.append(asyncio.create_task(asyncio.Event().wait()))",
        "tasks left behind",
    ),
    "blocked_loop": ("async def test_it():\n    time.sleep(1.7)", "Executing "),  # time: more than BLOCKED_S
    "open_arena_file": (
        "def test_it():\n"
        "    path = Path('/dev/shm/medialane-conftest-open')\n"
        "    HELD.append(path.open('wb'))\n"
        "    path.unlink()",
        "arena files left behind",
    ),
    "mapped_arena_file": (
        "def test_it():\n"
        "    path = Path('/dev/shm/medialane-conftest-mapped')\n"
        "    path.write_bytes(bytes(4096))\n"
        "    with path.open('rb') as file:\n"
        "        HELD.append(mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ))\n"
        "    path.unlink()",
        "arena files left behind",
    ),
    "abandoned_arena_file": (
        "def test_it():\n    Path('/dev/shm/medialane-conftest-abandoned').write_bytes(b'')",
        "arena files left behind",
    ),
}


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # no others run beside the test
    folder, shared_memory = (
        pytester.mkdir("unit"),
        str(pytester.mkdir("shm")),
    )  # not that of tests that run beside these
    conftest = Path(__file__).with_name("conftest.py").read_text()
    pytester.makeconftest(conftest.replace("/dev/shm", shared_memory))
    shared = {name: Path(__file__).with_name(f"{name}.py").read_text() for name in ("builders", "waiting")}
    pytester.makepyfile(**shared)
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")

    def run(source: str):
        (folder / "test_case.py").write_text(PREAMBLE + source.replace("/dev/shm", shared_memory))
        return pytester.runpytest_subprocess("-p", "no:cacheprovider")

    return run


@pytest.mark.parametrize("name", CASES)
def test_leaked_resources_fail_the_test(run, name):
    source, why = CASES[name]
    result = run(source)
    assert result.ret != 0
    result.stdout.fnmatch_lines([f"*{why}*"])


def test_clean_test_passes(run):
    source = "async def test_it():\n    task = asyncio.create_task(asyncio.Event().wait())\n    task.cancel()"
    assert run(source).ret == 0
