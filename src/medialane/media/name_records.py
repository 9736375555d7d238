"""Names that outlive their process: what a cache of names keeps its entries in besides its own memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol


class NameRecords(Protocol):
    """Payloads of a few bytes by key, kept on a best-effort basis: one that cannot be kept is missing at the next
    `read`, but never replaced by an earlier payload of its key. Methods take microseconds and raise nothing."""

    def read(self) -> Iterable[tuple[bytes, bytes]]:
        """Return keys and payloads as an earlier process has left them; called before the others."""
        ...

    def write(self, key: bytes, payload: bytes) -> None:
        """Keep `payload` in place of the earlier one of `key`, a hash of 32 bytes."""
        ...

    def erase(self, key: bytes) -> None: ...


class _NotKept:
    def read(self) -> Iterable[tuple[bytes, bytes]]:
        return ()

    def write(self, key: bytes, payload: bytes) -> None:
        pass

    def erase(self, key: bytes) -> None:
        pass


#: Records of names that are lost with their process.
NOT_KEPT: NameRecords = _NotKept()


def boot_time() -> float:
    """Return the seconds since the host has booted, which all of its processes agree on. Unlike time.monotonic it
    counts the time in which the host was suspended; unlike the date it is never set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
