"""The owner's file: creation, lock, pages, end."""

import errno
import os
import select
import signal
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest

from limits import files_up_to
from medialane.arena import ArenaConfig, ArenaView, reap
from medialane.arena import file as file_module
from medialane.arena.file import ArenaFile
from medialane.arena.index import index_bytes
from medialane.types.errors import StartupFailed
from races import before

MIB = 1 << 20


@pytest.fixture
def file(config):
    made = ArenaFile.create(config)
    yield made
    made.close()


def test_file_is_private_and_named_after_its_id(file, shm):
    assert file.path == Path(shm, f"medialane-{file.view.id}.arena")
    found = file.path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == 16 * MIB + index_bytes(16 * MIB)
    assert os.listdir(shm) == [file.path.name]


def test_no_two_arenas_share_an_id_or_a_nonce(file, config):
    other = ArenaFile.create(config)
    assert other.view.id != file.view.id
    assert other.view.nonce != file.view.nonce
    other.close()


def test_size_is_rounded_down_to_pages(shm):
    made = ArenaFile.create(ArenaConfig(size_bytes=16 * MIB + 4097, directory=shm))
    assert made.view.size_bytes == 16 * MIB + 4096
    assert made.path.stat().st_size == made.end_bytes == 16 * MIB + 4096 + index_bytes(16 * MIB + 4096)
    made.close()


def test_close_removes_the_file_exactly_once(file, shm):
    descriptors = len(os.listdir("/proc/self/fd"))
    file.close()
    file.close()
    assert os.listdir(shm) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors - 3  # the lock's and two mappings'


def test_failed_creation_leaves_no_file(config, shm):
    descriptors = len(os.listdir("/proc/self/fd"))
    with files_up_to(MIB), pytest.raises(StartupFailed, match=r"cannot create the arena in .*: File too large"):
        ArenaFile.create(config)
    assert os.listdir(shm) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_concurrent_creation_and_reaping_never_lose_an_arena(config, shm):
    stop = threading.Event()
    removed = []

    def keep_reaping():
        while not stop.is_set():
            removed.extend(reap(shm))

    reaper = threading.Thread(target=keep_reaping)
    reaper.start()
    made = [ArenaFile.create(config) for _ in range(150)]
    stop.set()
    reaper.join()
    assert {f.path.name for f in made} == set(os.listdir(shm))
    assert all(r.path.endswith(".tmp") for r in removed)
    for file in made:
        file.close()


def test_owner_whose_new_file_was_reaped_retries(config, shm):
    lost = []

    def reap_it():
        lost.append(len(reap(shm)))

    with before("fcntl.flock", reap_it, reap_it):
        made = ArenaFile.create(config)
    assert lost == [1, 1]
    assert os.listdir(shm) == [made.path.name]
    made.close()


def left_by_owner(config, start):
    """Have a process make an arena and call `start` with it, which starts another process, and kill it. Return the pid
    of the other one."""
    read, write = os.pipe()
    owner = os.fork()
    if owner == 0:
        try:
            os.write(write, str(start(ArenaFile.create(config))).encode())
            time.sleep(15)  # time: a leftover of a failed test ends by itself
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    other = int(os.read(read, 20))
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    os.close(read)
    os.close(write)
    return other


def end(pid):
    """Kill a process, which the process of the tests need not be the parent of."""
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([process], [], [])
    os.close(process)


def test_subprocess_does_not_inherit_the_lock(config, shm):
    def start(_made):
        return subprocess.Popen(["sleep", "15"], close_fds=False).pid

    child = left_by_owner(config, start)
    assert len(reap(shm)) == 1
    end(child)


@pytest.mark.parametrize(("closes", "reaped"), [(True, 1), (False, 0)])
def test_forked_child_holds_the_owner_lock_unless_it_closes_it(config, shm, closes, reaped):
    def start(made):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                if closes:
                    made.close()
                os.write(write, b"x")
                time.sleep(15)  # time: a leftover of a failed test ends by itself
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        os.read(read, 1)
        return child

    child = left_by_owner(config, start)
    assert len(os.listdir(shm)) == 1, "a child never removes its parent's file"
    assert len(reap(shm)) == reaped
    end(child)
    assert len(reap(shm)) == 1 - reaped


def resident(path):
    return path.stat().st_blocks * 512


def test_prefault_allocates_all_pages_and_changes_no_byte(file):
    memory = file.view.memory
    memory[5 * MIB : 5 * MIB + 5] = b"hello"
    before = bytes(memory[:4096])
    assert resident(file.path) < MIB
    assert file.prefault(threading.Event()) == 16 * MIB
    assert resident(file.path) == 16 * MIB + index_bytes(16 * MIB)
    assert bytes(memory[5 * MIB : 5 * MIB + 5]) == b"hello"
    assert bytes(memory[:4096]) == before


def test_prefault_can_stop_between_chunks(shm):
    stop, size = threading.Event(), 4 * file_module.PREFAULT_BYTES
    file = ArenaFile.create(ArenaConfig(size_bytes=size, directory=shm))
    done = file.prefault(stop, lambda _: stop.set())
    assert done == file_module.PREFAULT_BYTES
    assert resident(file.path) <= done + index_bytes(size)
    assert file.prefault(stop) == 0
    file.close()


def refuse_with(monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(file_module, "_madvise", refuse)


def test_kernel_without_populate_allocates_instead(file, monkeypatch):
    refuse_with(monkeypatch, errno.EINVAL)
    file.view.memory[5 * MIB : 5 * MIB + 5] = b"hello"
    assert file.prefault(threading.Event()) == 16 * MIB
    assert resident(file.path) == 16 * MIB + index_bytes(16 * MIB)
    assert bytes(file.view.memory[5 * MIB : 5 * MIB + 5]) == b"hello"


def test_shared_memory_filled_by_others_is_a_clear_error(file, monkeypatch):
    refuse_with(monkeypatch, errno.EFAULT)
    with pytest.raises(StartupFailed, match="docker run --shm-size"):
        file.prefault(threading.Event())


def test_kernel_without_populate_reports_a_full_file_system(file, monkeypatch):
    refuse_with(monkeypatch, errno.EINVAL)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StartupFailed, match="--arena-size"):
        file.prefault(threading.Event())


def test_prefault_in_a_thread_releases_the_gil(shm, monkeypatch):
    monkeypatch.setattr(file_module, "PREFAULT_BYTES", 256 * MIB)  # one call: only the lock can let others run
    made = ArenaFile.create(ArenaConfig(size_bytes=256 * MIB, directory=shm))
    thread = threading.Thread(target=made.prefault, args=(threading.Event(),))
    thread.start()
    turns = 0
    while thread.is_alive():
        thread.join(0.001)
        turns += 1
    assert resident(made.path) == 256 * MIB + index_bytes(256 * MIB)
    made.close()
    assert turns > 5


def test_mapping_survives_removal_of_the_file(file, shm):
    view = ArenaView.open(file.view.id, shm)
    file.view.memory[8192:8197] = b"hello"
    file.close()
    assert bytes(view.memory[8192:8197]) == b"hello"
    view.close()
