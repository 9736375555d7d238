"""Maps client-chosen names of media (vLLM's `uuid`) to content hashes. Pure: clock and records are injected.

A name is bound, per client's key and tenant (`cache_salt`, or none), to the hash of the content that was sent with it
first, until it expires: nobody else can make it name other content meanwhile. It is not a cache key: if a request has
both a name and content, the name never affects which content is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
from blake3 import blake3

from medialane.media.http_cache import NOT_KEPT, NameRecords, boot_time
from medialane.types.errors import UuidConflict
from medialane.types.media import Alias
from medialane.types.media_lease import TenantLru, tenant_of


class AliasTarget(NamedTuple):
    """The content hash, and the item options that were given with the name."""

    content: str
    io: bytes
    options: bytes


class _Bound(NamedTuple):
    target: AliasTarget
    expires_at: float
    tenant: bytes = b""


class Aliases:
    """An LRU cache, of which a tenant has a share; names expire after `ttl_s` seconds without use. They are kept in
    `records` and taken from there; the `clock` must be that of the process which has written them."""

    def __init__(
        self,
        *,
        max_aliases: int,
        ttl_s: float,
        tenant_share: float = 1.0,
        clock: Callable[[], float] = boot_time,
        records: NameRecords = NOT_KEPT,
    ) -> None:
        self._max_aliases = max_aliases
        self._ttl_s = ttl_s
        self._clock = clock
        self._records = records
        self._bound: TenantLru[_Bound] = TenantLru(
            max_aliases, tenant_share=tenant_share, clock=clock, on_forget=records.erase
        )
        self._restore()

    def __len__(self) -> int:
        return len(self._bound)

    def bind(self, salt: str, alias: Alias, content: str) -> None:
        """Bind the name to this content and to the options given now. Raises UuidConflict if it is bound to other
        content."""
        if not self._max_aliases:
            return
        key = _key(salt, alias)
        if (bound := self._bound.get(key)) is not None and bound.target.content != content:
            raise UuidConflict("this uuid is in use for other content: choose another one")
        self._use(key, AliasTarget(content, alias.io, alias.options), tenant_of(alias.owner))

    def find(self, salt: str, alias: Alias) -> AliasTarget | None:
        """Return what the name is bound to, or None. Options given with the name now override those it is bound to."""
        key = _key(salt, alias)
        if (bound := self._bound.get(key)) is None:
            return None
        target = bound.target
        self._use(key, target, bound.tenant)
        return target._replace(
            io=target.io if alias.io == b"{}" else alias.io,
            options=target.options if alias.options == b"{}" else alias.options,
        )

    def _use(self, key: bytes, target: AliasTarget, tenant: bytes) -> None:
        """Let the name expire later."""
        bound = _Bound(target, self._clock() + self._ttl_s, tenant)
        self._put(key, bound)  # first, so that there is a free record
        self._records.write(key, msgspec.msgpack.encode(bound))

    def _put(self, key: bytes, bound: _Bound) -> None:
        self._bound.put(key, bound, expires_at=bound.expires_at, tenant=bound.tenant)

    def _restore(self) -> None:
        """Take the names of an earlier process; what exceeds the settings of this one is forgotten."""
        latest = self._clock() + self._ttl_s
        kept = [(key, msgspec.msgpack.decode(payload, type=_Bound)) for key, payload in self._records.read()]
        for key, bound in sorted(kept, key=lambda one: one[1].expires_at):
            self._put(key, bound._replace(expires_at=min(bound.expires_at, latest)))


def _key(salt: str, alias: Alias) -> bytes:
    """Return a fixed-size key: names may have any length."""
    return blake3(msgspec.msgpack.encode((alias.owner, salt, alias.kind, alias.uuid))).digest()
