"""Errors for the operator if the arena cannot be created."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from medialane.arena import Arena, ArenaConfig
from medialane.types.errors import StartupFailed

MIB, GIB = 1 << 20, 1 << 30


def test_default_is_two_gib_in_shared_memory():
    assert ArenaConfig() == ArenaConfig(size_bytes=2 * GIB, directory="/dev/shm")


def small(monkeypatch, free_bytes):
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free_bytes // 4096, f_frsize=4096))


def test_too_small_shared_memory_is_one_clear_error_and_leaves_no_file(monkeypatch, shm):
    small(monkeypatch, 64 * MIB)
    with pytest.raises(StartupFailed) as caught:
        Arena.create(ArenaConfig(size_bytes=2 * GIB, directory=shm))
    assert caught.value.message == (
        f"the arena needs 2 GiB but {shm} has 64 MiB free: enlarge it "
        "(docker run --shm-size=3g, or --ipc=host) or make the arena smaller (--arena-size)"
    )
    assert os.listdir(shm) == []


def test_too_small_file_system_is_rejected():
    with pytest.raises(StartupFailed, match=r"the arena needs 1024 TiB but /dev/shm has"):
        ArenaConfig(size_bytes=1 << 50).validate()


def test_exactly_sufficient_space_is_accepted(monkeypatch, shm):
    small(monkeypatch, 32 * MIB)
    ArenaConfig(size_bytes=32 * MIB, directory=shm).validate()
    with pytest.raises(StartupFailed):
        ArenaConfig(size_bytes=32 * MIB + 1, directory=shm).validate()


def test_space_of_a_dead_owner_counts_as_free(monkeypatch, shm):
    small(monkeypatch, 30 * MIB)
    left = Path(shm) / f"medialane-{'ab' * 16}.arena"
    left.write_bytes(b"medialan" + bytes(2 * MIB))
    ArenaConfig(size_bytes=32 * MIB, directory=shm).validate()
    left.unlink()
    with pytest.raises(StartupFailed):
        ArenaConfig(size_bytes=32 * MIB, directory=shm).validate()


def test_arena_below_the_minimum_is_rejected():
    with pytest.raises(StartupFailed, match="--arena-size is 15 MiB; the minimum is 16 MiB"):
        ArenaConfig(size_bytes=15 * MIB).validate()


def test_missing_directory_is_named(tmp_path):
    with pytest.raises(StartupFailed, match=r"--arena-directory .*nowhere cannot be used: No such file"):
        ArenaConfig(size_bytes=16 * MIB, directory=str(tmp_path / "nowhere")).validate()


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_invalid_share_is_rejected_by_name(share):
    with pytest.raises(StartupFailed, match="arena_decoded_share"):
        ArenaConfig(decoded_share=share).validate()


@pytest.mark.parametrize("directory", ["/proc", "/sys"])
def test_other_file_system_is_refused_with_what_would_be_right(directory):
    with pytest.raises(StartupFailed, match=rf"--arena-directory {directory} is not on a tmpfs: .*use /dev/shm, or mo"):
        ArenaConfig(size_bytes=16 * MIB, directory=directory).validate()
