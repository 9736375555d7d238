"""Which content clients mean by their names for it (vLLM's `uuid`). Pure: the clock is given.

A name is bound to the content that was last sent with it, by its hash, within its tenant (`cache_salt`, or none). It is
the key of nothing else: what content a request is answered with never depends on a name that came with content.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from blake3 import blake3

from medialane.core.media import Alias


class AliasTarget(NamedTuple):
    """The content's hash, and the item options that were said with the name."""

    content: str
    io: bytes
    options: bytes


class Aliases:
    """The least recently used name is forgotten first, each after `ttl_s` without use."""

    def __init__(self, *, max_aliases: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_aliases = max_aliases
        self._ttl_s = ttl_s
        self._clock = clock
        self._targets: OrderedDict[bytes, tuple[AliasTarget, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._targets)

    def bind(self, salt: str, alias: Alias, content: str) -> None:
        """From now on the name means this content."""
        key = _key(salt, alias)
        self._targets[key] = AliasTarget(content, alias.io, alias.options), self._clock() + self._ttl_s
        self._targets.move_to_end(key)
        if len(self._targets) > self._max_aliases:
            self._targets.popitem(last=False)

    def find(self, salt: str, alias: Alias) -> AliasTarget | None:
        """What the name means, None where that is not known. Options said with the name now count, if there are any."""
        key = _key(salt, alias)
        if (found := self._targets.get(key)) is None:
            return None
        bound, expires = found
        now = self._clock()
        if expires <= now:
            del self._targets[key]
            return None
        self._targets[key] = bound, now + self._ttl_s
        self._targets.move_to_end(key)
        return bound._replace(
            io=bound.io if alias.io == b"{}" else alias.io,
            options=bound.options if alias.options == b"{}" else alias.options,
        )


def _key(salt: str, alias: Alias) -> bytes:
    """Names may be of any length; what is kept of one is not."""
    return blake3(msgspec.msgpack.encode((salt, alias.kind, alias.uuid))).digest()
