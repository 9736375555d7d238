"""The checks on every test fail a test that leaks."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from left_behind import other_runs
from waiting import wait_until

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
    "open_socket_of_a_loop": (
        "async def test_it():\n    import socket\n    HELD.extend(socket.socketpair())",
        "descriptors left open",
    ),
    "open_socket": (
        "def test_it():\n    import socket\n    HELD.extend(socket.socketpair())",
        "descriptors left open",
    ),
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
    folder = pytester.mkdir("unit") / "runtime"  # one of COUNTED_ROOMS
    folder.mkdir()
    shared_memory = str(pytester.mkdir("shm"))  # not that of tests that run beside these
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    names = ("builders", "left_behind", "waiting")
    shared = {name: Path(__file__).with_name(f"{name}.py").read_text() for name in names}
    shared["left_behind"] += "\ndef other_runs() -> list[int]:\n    return []\n"  # that have nothing in this folder
    pytester.makepyfile(**{name: text.replace("/dev/shm", shared_memory) for name, text in shared.items()})
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


def test_process_that_this_run_has_not_started_is_another_runs():
    own = subprocess.Popen(["bash", "-c", "exec -a 'medialane store' sleep 60"])
    orphan = int(subprocess.check_output(["bash", "-c", "(exec -a 'medialane store' sleep 60 >/dev/null) & echo $!"]))
    try:
        wait_until(lambda: orphan in other_runs(), "its shell has exited")
        assert own.pid not in other_runs()
    finally:
        own.kill()
        own.wait()
        os.kill(orphan, signal.SIGKILL)
