"""Hosts for tests of the nixl mover: an arena and a mover each, whose process may be in a network namespace."""

import importlib.util
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from medialane.arena import Arena, ArenaConfig
from medialane.transfer import Destination, OpenedEntry
from medialane.transfer.nixl import NixlMover
from medialane.types.feature import Feature, RemoteEntry
from medialane.types.media import MediaSize
from waiting import wait_until

FAKE = "fake_nixl:FakeAgent"
MIB = 1 << 20


def fake_mover(*args, environ: Mapping[str, str], **settings) -> NixlMover:
    return NixlMover(*args, environ=_with_tests(environ), factory=FAKE, **settings)


def _with_tests(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with which a mover process finds `fake_nixl`."""
    paths = filter(None, [str(Path(__file__).parent), environ.get("PYTHONPATH")])
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}


def require_nixl() -> None:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("NOT TESTED: NIXL is not installed (the extra nixl)")


class Host:
    """Owns an arena, a mover, and the ranges that a test uses."""

    def __init__(self, *, size_bytes: int = 32 * MIB, max_given_up_bytes: int = 64 * MIB, **mover) -> None:
        self.arena = Arena.create(ArenaConfig(size_bytes=size_bytes))
        directory = str(self.arena.path.parent)
        self.mover = NixlMover(
            self.arena.id,
            directory,
            slot=self.arena.slot,
            max_given_up_bytes=max_given_up_bytes,
            environ=_with_tests(os.environ),
            **mover,
        )
        self._owned = []
        self._keys = count()

    async def opened(self, data: bytes) -> OpenedEntry:
        """Return a new entry with this payload, as a reader on another host sees it."""
        with self.arena.reserve(len(data)) as reservation:
            reservation.buffer[:] = data
            key = str(next(self._keys))
            pin = self.arena.publish(reservation, key, Feature("image", key, b"", (), MediaSize()))
        self._owned.append(pin.release)
        offer = await self.mover.offer(wait=True)
        entry = RemoteEntry(pin.range, "processed", "key", "tcp://owner:1", 0, b"")
        return OpenedEntry(entry, {} if offer is None else {"nixl": offer})

    def free_last(self) -> None:
        """Free the last new entry."""
        self._owned.pop()()
        self.arena.clear()

    def destination(self, num_bytes: int) -> Destination:
        reservation = self.arena.reserve(num_bytes)
        self._owned.append(reservation.abandon)
        reservation.buffer[:] = bytes(num_bytes)
        return Destination(reservation.range, reservation.buffer)

    async def read(self, opened: OpenedEntry, deadline_s: float = 60.0) -> bytes:
        """Read to a new range, and return what is there."""
        destination = self.destination(opened.entry.range.nbytes - 64)
        await self.mover.read(opened, destination, deadline_s=deadline_s)
        return bytes(destination.payload)

    def stop(self) -> None:
        os.kill(self.mover.pid, signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{self.mover.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def resume(self) -> None:
        os.kill(self.mover.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.mover.pid, signal.SIGKILL)

    async def close(self) -> None:
        if self.mover.pid is not None:
            with suppress(ProcessLookupError):
                self.resume()
        await self.mover.close()
        for end in self._owned:
            end()
        self.arena.close()
