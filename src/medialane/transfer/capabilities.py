"""Capabilities: the right of another host's store to read one entry of our arena, without state on our side."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

import msgspec

from medialane.types.errors import HandoverFailed
from medialane.types.feature import EntryKind, RemoteEntry
from medialane.types.tensor import ArenaRange

#: A worker asks for the entry as soon as it has received the request.
LIFETIME_S = 120.0


class Capabilities:
    """The key is random, made at the store's start: no capability outlives its store. `address` is that of our peer
    listener. `expires_ms` counts on our own clock, so the other hosts' clocks do not matter."""

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self._key = secrets.token_bytes(32)
        self._clock = clock

    def give(self, granted: ArenaRange, kind: EntryKind, key: str) -> RemoteEntry:
        expires_ms = int((self._clock() + LIFETIME_S) * 1000)
        mac = self._mac(granted, kind, key, expires_ms)
        return RemoteEntry(granted, kind, key, self.address, expires_ms, mac)

    def check(self, entry: RemoteEntry) -> None:
        """Raises HandoverFailed if we did not give this capability, or it has expired."""
        mac = self._mac(entry.range, entry.kind, entry.key, entry.expires_ms)
        if not hmac.compare_digest(mac, entry.capability):
            raise HandoverFailed("the capability is not one of this store")
        if entry.expires_ms < self._clock() * 1000:
            raise HandoverFailed("the capability has expired")

    def _mac(self, granted: ArenaRange, kind: EntryKind, key: str, expires_ms: int) -> bytes:
        signed = msgspec.msgpack.encode((granted, kind, key, expires_ms))  # a list of fixed length: unambiguous
        return hmac.digest(self._key, signed, hashlib.sha256)
