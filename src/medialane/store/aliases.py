"""Maps client-chosen names of media (vLLM's `uuid`) to content hashes. Pure: the clock is injected.

A name is bound, per client's key and tenant (`cache_salt`, or none), to the hash of the content that was sent with it
first, until it expires: nobody else can make it name other content meanwhile. It is not a cache key: if a request has
both a name and content, the name never affects which content is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from blake3 import blake3
from cachetools import TTLCache

from medialane.core.errors import UuidConflict
from medialane.core.media import Alias


class AliasTarget(NamedTuple):
    """The content hash, and the item options that were given with the name."""

    content: str
    io: bytes
    options: bytes


class Aliases:
    """An LRU cache; names expire after `ttl_s` seconds without use."""

    def __init__(self, *, max_aliases: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_enabled = max_aliases > 0
        self._targets: TTLCache[bytes, AliasTarget] = TTLCache(max_aliases, ttl_s, clock)

    def __len__(self) -> int:
        return len(self._targets)

    def bind(self, salt: str, alias: Alias, content: str) -> None:
        """Bind the name to this content and to the options given now. Raises UuidConflict if it is bound to other
        content."""
        if not self._is_enabled:
            return
        key = _key(salt, alias)
        if (bound := self._targets.get(key)) is not None and bound.content != content:
            raise UuidConflict("this uuid is in use for other content: choose another one")
        self._targets[key] = AliasTarget(content, alias.io, alias.options)

    def find(self, salt: str, alias: Alias) -> AliasTarget | None:
        """Return what the name is bound to, or None. Options given with the name now override those it is bound to."""
        key = _key(salt, alias)
        if (bound := self._targets.get(key)) is None:
            return None
        self._targets[key] = bound  # a use: it expires later
        return bound._replace(
            io=bound.io if alias.io == b"{}" else alias.io,
            options=bound.options if alias.options == b"{}" else alias.options,
        )


def _key(salt: str, alias: Alias) -> bytes:
    """Return a fixed-size key: names may have any length."""
    return blake3(msgspec.msgpack.encode((alias.client, salt, alias.kind, alias.uuid))).digest()
