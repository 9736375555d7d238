"""Reaping files of killed owners, and files that must never be touched."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from medialane.arena import Arena, ArenaView, Reaped, reap
from medialane.arena.layout import KEPT, Lineage
from medialane.arena.locks import reclaimable_bytes
from medialane.types.tensor import ArenaRange

OWNER = Path(__file__).with_name("owner.py")


class Ready(msgspec.Struct):
    arena: str
    nonce: bytes
    range: ArenaRange


@contextmanager
def running_owner(shm):
    """A process that owns an arena with the entry b"hello"; killed in the end."""
    command = [sys.executable, str(OWNER), shm]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process, msgspec.json.decode(process.stdout.readline(), type=Ready)
        finally:
            process.kill()


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_file_of_a_killed_owner_is_reaped_and_a_readers_mapping_stays_valid(shm):
    with running_owner(shm) as (process, ready):
        view = ArenaView.open(ready.arena, shm)
        assert view.nonce == ready.nonce
        kill(process)
        (removed,) = reap(shm)
    assert removed.path == os.path.join(shm, f"medialane-{ready.arena}.arena")
    assert removed.num_bytes >= 2 * 4096
    assert os.listdir(shm) == []
    assert bytes(view.entry(ready.range)[64:]) == b"hello"
    view.close()


def test_file_of_a_live_owner_stays(shm):
    with running_owner(shm) as (process, ready):
        assert reap(shm) == []
        assert reclaimable_bytes(shm) == 0
        ArenaView.open(ready.arena, shm).close()
        kill(process)
        assert reclaimable_bytes(shm) > 0
        assert len(reap(shm)) == 1


def test_file_that_waits_for_its_next_owner_counts_as_free_space(shm, config):
    """Or a killed store could not start again where there is room for one arena only."""
    lineage = Lineage(b"of a test" + bytes(7))
    arena = Arena.create(config, lineage=lineage)
    arena.keep_for(KEPT)
    arena.close(keep=True)
    assert reap(shm) == []
    assert reclaimable_bytes(shm) > 0
    Arena.open(config, lineage=lineage).close()


def test_only_files_of_dead_owners_are_reaped(shm, config):
    living = Arena.create(config)
    with running_owner(shm) as (process, ready):
        kill(process)
    assert [Path(r.path).name for r in reap(shm)] == [f"medialane-{ready.arena}.arena"]
    assert os.listdir(shm) == [living.path.name]
    living.close()


@pytest.mark.parametrize("content", [b"", b"medialan", b"medialan" + bytes(8192)])
def test_unfinished_file_is_reaped(shm, content):
    path = Path(shm, f"medialane-{'ab' * 16}.arena.tmp")
    path.write_bytes(content)
    assert reap(shm) == [Reaped(str(path), -(-len(content) // 4096) * 4096)]
    assert not path.exists()


def test_unfinished_file_of_a_live_owner_stays(shm):
    path = Path(shm, f"medialane-{'ab' * 16}.arena.tmp")
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert reap(shm) == []
        assert path.exists()
    assert len(reap(shm)) == 1


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # the test's folder is the current one: a socket's path is short


OURS_BY_NAME = f"medialane-{'ab' * 16}.arena"


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("other.arena", Path.touch),
        (f"medialane-{'ab' * 15}.arena", Path.touch),
        (f"medialane-{'AB' * 16}.arena", Path.touch),
        (OURS_BY_NAME + ".bak", Path.touch),
        (f"x{OURS_BY_NAME}", Path.touch),
        (OURS_BY_NAME, lambda p: p.write_bytes(b"another user's")),
        (OURS_BY_NAME, Path.mkdir),
        (OURS_BY_NAME, lambda p: os.mkfifo(p)),
        (OURS_BY_NAME, make_socket),
        (OURS_BY_NAME, lambda p: p.symlink_to("target")),
    ],
    ids=["name", "short id", "upper case", "suffix", "prefix", "content", "folder", "fifo", "socket", "link"],
)
def test_foreign_files_stay(tmp_path, monkeypatch, name, make):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").write_bytes(b"medialan")
    make(tmp_path / name)
    before = sorted(os.listdir(tmp_path))
    assert reap(str(tmp_path)) == []
    assert sorted(os.listdir(tmp_path)) == before


def test_file_of_another_user_stays(shm, monkeypatch, become_another_user):
    path = Path(shm, OURS_BY_NAME)
    path.touch()
    become_another_user()
    assert reap(shm) == []
    monkeypatch.undo()
    assert len(reap(shm)) == 1


def test_reaping_leaks_no_descriptor(shm):
    Path(shm, OURS_BY_NAME).touch()
    Path(shm, f"medialane-{'cd' * 16}.arena").write_bytes(b"not ours")
    before = len(os.listdir("/proc/self/fd"))
    reap(shm)
    reclaimable_bytes(shm)
    assert len(os.listdir("/proc/self/fd")) == before
    Path(shm, f"medialane-{'cd' * 16}.arena").unlink()
