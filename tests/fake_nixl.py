"""An agent without NIXL: it reads the memory of another process of this user through /proc.

Like NIXL over TCP, a read from a stopped process neither ends nor fails, and its bytes arrive after the process has
continued; a read from a process that has exited fails.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from medialane.transfer.nixl.agent import AgentError, Descriptor


class FakeMetadata(msgspec.Struct):
    name: str
    pid: int


class FakeTransfer:
    def __init__(self, pid: int, sources: Sequence[Descriptor], destinations: Sequence[Descriptor]) -> None:
        self._pid = pid
        self._pairs = list(zip(sources, destinations, strict=True))

    def is_done(self) -> bool:
        if _is_stopped(self._pid):
            return False
        try:
            memory = os.open(f"/proc/{self._pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise AgentError(f"the peer has exited: {error.strerror}") from error
        try:
            for source, destination in self._pairs:
                _copy(memory, source, destination)
        finally:
            os.close(memory)
        return True

    def release(self) -> None:
        pass


class FakeAgent:
    """An agent of one process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._peers: dict[str, int] = {}

    def register(self, memory: Descriptor) -> None:
        pass

    def metadata(self) -> bytes:
        return msgspec.msgpack.encode(FakeMetadata(self._name, os.getpid()))

    def add_peer(self, metadata: bytes) -> str:
        try:
            peer = msgspec.msgpack.decode(metadata, type=FakeMetadata)
        except msgspec.DecodeError as error:
            raise AgentError(str(error)) from error
        self._peers[peer.name] = peer.pid
        return peer.name

    def remove_peer(self, name: str) -> None:
        self._peers.pop(name, None)

    def read(
        self, peer: str, sources: Sequence[Descriptor], destinations: Sequence[Descriptor], notification: bytes
    ) -> FakeTransfer:
        if peer not in self._peers:
            raise AgentError("unknown peer")
        return FakeTransfer(self._peers[peer], sources, destinations)

    def notifications(self) -> list[bytes]:
        return []


def slow_agent(name: str) -> FakeAgent:
    """Return an agent after 3 s, as on a host where NIXL's libraries are read from a busy disk."""
    time.sleep(3.0)  # time: longer than the deadline of a read
    return FakeAgent(name)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    except FileNotFoundError:
        return False


def _copy(memory: int, source: Descriptor, destination: Descriptor) -> None:
    target = (ctypes.c_char * destination.size).from_address(destination.ptr)
    done = 0
    while done < source.size:
        try:
            num_copied = os.preadv(memory, [memoryview(target)[done:]], source.ptr + done)
        except OSError as error:
            raise AgentError(f"the peer's memory cannot be read: {error.strerror}") from error
        if not num_copied:
            raise AgentError("the peer has exited")
        done += num_copied
