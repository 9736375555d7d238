"""Media that a client has sent once, to be referred to by later requests: `medialane:media/HASH`; and bounds in which
each tenant has a share.

The hash is one of content, owner and salt: it is the same on all hosts, and says nothing about what others have sent.
It is no capability: who may use it is decided by the owner of the request that has it.
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import msgspec
from blake3 import blake3

from medialane.types.errors import InvalidMediaUrl, InvalidRequest
from medialane.types.media import MediaSource

#: The beginning of such a URL.
MEDIA_SCHEME = "medialane:media/"

#: Beginning of the owner that is a tenant (`--keys`): its share of all leased bytes is limited.
TENANT = "tenant:"

#: As the member of bodies: the path of a request is logged, headers are not.
SALT_HEADER = b"x-cache-salt"

_HASH = re.compile(r"[0-9a-f]{64}")


class LeasedMedia(msgspec.Struct, frozen=True, array_like=True):
    """A lease, and what is known of its media: width and height of images, as they are displayed; the duration of
    others; 0 what does not apply or is not known. `created_at` is in seconds since 1970; `name` and `purpose` of a file
    are the client's, empty if they are not known any more."""

    hash: str
    modality: MediaSource
    media_type: str
    num_bytes: int
    remaining_s: float = 0.0
    width: int = 0
    height: int = 0
    duration_s: float = 0.0
    created_at: float = 0.0
    name: str = ""
    purpose: str = ""


def media_hash(*, owner: str, salt: str, content: str) -> str:
    """Return the hash by which an owner's requests refer to media, 64 hex digits."""
    return blake3(msgspec.msgpack.encode(("medialane-media-1", owner, salt, content))).hexdigest()


def is_hash(text: str) -> bool:
    return _HASH.fullmatch(text) is not None


def is_leased(url: str | None) -> bool:
    """Return whether a URL that intake has accepted refers to leased media."""
    return url is not None and url.startswith(MEDIA_SCHEME)


def leased_hash(url: str) -> str:
    """Return the hash in the URL of leased media. Raises InvalidMediaUrl."""
    found = url.removeprefix(MEDIA_SCHEME)
    if not is_hash(found):
        raise InvalidMediaUrl(f"{MEDIA_SCHEME} must be followed by a hash of 64 hexadecimal digits in lower case")
    return found


def salt_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the `cache_salt` of a request without a JSON body; empty without one. Raises InvalidRequest."""
    try:
        return next((value for name, value in headers if name == SALT_HEADER), b"").decode()
    except UnicodeDecodeError as error:
        name = SALT_HEADER.decode()
        raise InvalidRequest(f"the header {name} is not valid UTF-8", param=name) from error


V = TypeVar("V")

_DIGEST_BYTES = 8


class _Entry(NamedTuple, Generic[V]):
    value: V
    expires_at: float
    tenant: bytes
    size: int


def tenant_of(owner: str) -> bytes:
    """Return a digest of the tenant that an owner is; empty for an owner that is none, which has no share."""
    return blake3(owner.encode()).digest(length=_DIGEST_BYTES) if owner.startswith(TENANT) else b""


class TenantShares:
    """How much of `most` is used, by all and by each tenant. A tenant may use a share of it, and `least_share` in any
    case; owners without a tenant (an empty one) may use all of it together."""

    def __init__(self, most: int, *, tenant_share: float = 1.0, least_share: int = 1) -> None:
        self.most = most
        self.used = 0
        self._most_of_tenant = max(int(most * tenant_share), least_share)
        self._of_tenant: Counter[bytes | str] = Counter()

    def most_of(self, tenant: bytes | str) -> int:
        return self._most_of_tenant if tenant else self.most

    @property
    def free(self) -> int:
        """What is left, negative if too much is used."""
        return self.most - self.used

    def free_of(self, tenant: bytes | str) -> int:
        """What is left of a tenant's share, whatever others use."""
        return self.most_of(tenant) - self._of_tenant[tenant]

    def add(self, tenant: bytes | str, number: int) -> None:
        self.used += number
        self._of_tenant[tenant] += number
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]


class TenantLru(Generic[V]):
    """By key, the least recently put first, which is to expire first: all of a table last equally long. Owners that are
    no tenants may fill it. `on_forget` is called with each key that has expired or is replaced by another one."""

    def __init__(
        self,
        max_size: int,
        *,
        tenant_share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        on_forget: Callable[[bytes], object] = lambda _: None,
    ) -> None:
        self._shares = TenantShares(max_size, tenant_share=tenant_share)
        self._clock = clock
        self._on_forget = on_forget
        self._entries: OrderedDict[bytes, _Entry[V]] = OrderedDict()
        self._of_tenant: dict[bytes, OrderedDict[bytes, None]] = {}

    def __len__(self) -> int:
        self._expire()
        return len(self._entries)

    def get(self, key: bytes) -> V | None:
        self._expire()
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def use(self, key: bytes, *, expires_at: float) -> V | None:
        """As `get`, and put the entry again."""
        self._expire()
        if (entry := self._entries.get(key)) is None:
            return None
        self.put(key, entry.value, expires_at=expires_at, tenant=entry.tenant, size=entry.size)
        return entry.value

    def put(self, key: bytes, value: V, *, expires_at: float, tenant: bytes = b"", size: int = 1) -> None:
        """Put an entry behind all others, in place of the one with its key. It is not kept, like what it has replaced,
        if it is larger than the table or its tenant's share."""
        self._pop(key)
        self._entries[key] = _Entry(value, expires_at, tenant, size)
        self._of_tenant.setdefault(tenant, OrderedDict())[key] = None
        self._shares.add(tenant, size)
        while self._shares.free_of(tenant) < 0:
            self._forget(next(iter(self._of_tenant[tenant])))
        while self._shares.free < 0:
            self._forget(next(iter(self._entries)))

    def _expire(self) -> None:
        now = self._clock()
        while self._entries and self._entries[key := next(iter(self._entries))].expires_at <= now:
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        self._pop(key)
        self._on_forget(key)

    def _pop(self, key: bytes) -> None:
        if (entry := self._entries.pop(key, None)) is None:
            return
        self._shares.add(entry.tenant, -entry.size)
        own = self._of_tenant[entry.tenant]
        del own[key]
        if not own:
            del self._of_tenant[entry.tenant]
