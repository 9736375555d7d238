import signal
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_processes import is_running

from medialane.cluster import kill_members, members, orphan_reaper, send
from waiting import wait_until

SCRIPT = """
import subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
child = subprocess.Popen(["sleep", "60"])
open(sys.argv[1], "w").write(f"{memory.name} {child.pid}")
time.sleep(60)  # time: a leftover of a failed test ends by itself
"""


@pytest.fixture
def group(tmp_path):
    """A process group with shared memory: its leader, the name of the memory, a child's id."""
    note = tmp_path / "note"
    leader = subprocess.Popen([sys.executable, "-c", SCRIPT, str(note)], start_new_session=True)
    wait_until(lambda: note.exists() and len(note.read_text().split()) == 2)
    name, child = note.read_text().split()
    yield leader, Path("/dev/shm") / name, int(child)
    send(leader.pid, signal.SIGKILL)
    leader.wait()


def test_shared_memory_of_killed_processes_is_left_to_the_tracker(group):
    leader, memory, child = group
    assert {leader.pid, child} < set(members(leader.pid))
    assert memory.exists()
    kill_members(leader.pid)
    wait_until(lambda: not members(leader.pid))
    assert not memory.exists()
    assert not is_running(child)


def test_guard_kills_only_registered_process_groups(group, tmp_path):
    leader, memory, child = group
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    words = f"+{leader.pid}\n+{other.pid}\n-{other.pid}\n"
    subprocess.run([sys.executable, "-I", "-S", orphan_reaper.__file__], input=words, text=True, check=True, timeout=15)
    try:
        assert not is_running(leader.pid)
        assert not is_running(child)
        assert not memory.exists()
        assert is_running(other.pid)
    finally:
        other.kill()
        other.wait()


def test_signalling_an_empty_process_group_is_allowed():
    send(2**22 - 1, signal.SIGTERM)
    assert members(2**22 - 1) == []
