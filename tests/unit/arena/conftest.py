"""Arenas for tests: small, in a folder of shared memory of their own that must be empty in the end."""

import errno
import fcntl
import os
import shutil
import tempfile

import pytest

from medialane.arena import ArenaConfig

MIB = 1 << 20


@pytest.fixture
def shm():
    """A folder in /dev/shm. A test that leaves an arena there fails."""
    folder = tempfile.mkdtemp(prefix="medialane-test-", dir="/dev/shm")
    yield folder
    left = sorted(p for p in os.listdir(folder) if p.startswith("medialane-"))
    shutil.rmtree(folder)
    assert left == []


@pytest.fixture
def _no_byte_locks(monkeypatch):
    """As in gVisor, where parts of files cannot be locked."""

    def refuse(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", refuse)


@pytest.fixture
def config(shm):
    return ArenaConfig(size_bytes=16 * MIB, directory=shm)
