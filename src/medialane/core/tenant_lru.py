"""A cache of bounded size, of which each tenant has a share: more than that replaces its own oldest entries."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from blake3 import blake3

from medialane.core.media_lease import TENANT

V = TypeVar("V")

_DIGEST_BYTES = 8


class _Entry(NamedTuple, Generic[V]):
    value: V
    tenant: bytes
    size: int


def tenant_of(owner: str) -> bytes:
    """Return a digest of the tenant that an owner is; empty for an owner that is none, which has no share."""
    return blake3(owner.encode()).digest(length=_DIGEST_BYTES) if owner.startswith(TENANT) else b""


class TenantLru(Generic[V]):
    """By key, the least recently put first. Owners that are no tenants may fill it."""

    def __init__(self, max_size: int, *, tenant_share: float = 1.0) -> None:
        self._max_size = max_size
        self._max_tenant_size = int(max_size * tenant_share)
        self._entries: OrderedDict[bytes, _Entry[V]] = OrderedDict()
        self._of_tenant: dict[bytes, OrderedDict[bytes, None]] = {}
        self._sizes: Counter[bytes] = Counter()
        self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._entries)

    def get(self, key: bytes) -> V | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def put(self, key: bytes, value: V, *, tenant: bytes = b"", size: int = 1) -> list[bytes]:
        """Put an entry behind all others, in place of the one with its key. Return the keys of those that it has
        replaced, which may be its own: it is not kept if it is larger than the cache, or its tenant's share."""
        self.pop(key)
        self._entries[key] = _Entry(value, tenant, size)
        self._of_tenant.setdefault(tenant, OrderedDict())[key] = None
        self._count(tenant, size)
        replaced = []
        while tenant and self._sizes[tenant] > self._max_tenant_size:
            replaced.append(next(iter(self._of_tenant[tenant])))
            self.pop(replaced[-1])
        while self._size > self._max_size:
            replaced.append(next(iter(self._entries)))
            self.pop(replaced[-1])
        return replaced

    def pop(self, key: bytes) -> None:
        """Forget an entry, if there is one."""
        if (entry := self._entries.pop(key, None)) is None:
            return
        self._count(entry.tenant, -entry.size)
        own = self._of_tenant[entry.tenant]
        del own[key]
        if not own:
            del self._of_tenant[entry.tenant], self._sizes[entry.tenant]

    def _count(self, tenant: bytes, size: int) -> None:
        self._sizes[tenant] += size
        self._size += size
