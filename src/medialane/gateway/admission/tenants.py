"""Tenants: who may ask, at what rate, how many requests at a time, and with what priority, by the file of `--keys`; and
how many requests with media there are at a time, in all and of one tenant. Gateways of one port count them together
(`SharedCounts`).

The file has one JSON object a line for each tenant, with the hash of its key and its limits:

    {"name": "search", "sha256": "9f86d0...", "rate": 20, "burst": 60, "concurrency": 200}
    {"name": "nightly", "sha256": "60303a...", "concurrency": 32, "priority": 10}

Empty lines, and lines that begin with `#`, are skipped. The file has no key, only hashes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated
from zlib import crc32

import msgspec

from medialane.runtime.private_files import read_private
from medialane.types.errors import (
    ConcurrencyLimitExceeded,
    MediaOverloaded,
    Permits,
    RateLimitExceeded,
    StartupFailed,
    retry_after,
)
from medialane.types.media_lease import TenantShares

if TYPE_CHECKING:
    from medialane.gateway.request.scope import RequestScope


logger = logging.getLogger(__name__)

SETTING = "--keys"

_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
#: Names that all gateways have; tenants have none that begins like these.
QUEUED_REQUESTS = "~requests"
QUEUED_BYTES = "~bytes"
PREPARING = "~preparing"
PREPARED = "~prepared"
WAITING = "~waiting"
#: Rows; the file is sparse, and a row that no name has takes no memory.
_NUM_ROWS = 1 << 16
_FLOAT_BYTES = 8


class TenantLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the file. `sha256` are the SHA-256 hashes of the tenant's key, or keys, in hexadecimal.

    `rate` limits requests per second, in the mean; `burst` is how many may come at once (default: one second's).
    `concurrency` limits requests in flight. None: unlimited. `priority` is the most urgent (lowest) that the tenant's
    requests may have; one that asks for less has what it asks for.
    """

    name: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    sha256: _Hash | Annotated[list[_Hash], msgspec.Meta(min_length=1)]
    rate: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    burst: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)] = 0

    @property
    def digests(self) -> list[bytes]:
        hashes = [self.sha256] if isinstance(self.sha256, str) else self.sha256
        return [bytes.fromhex(each) for each in hashes]

    @property
    def max_burst(self) -> float:
        return self.burst if self.burst is not None else max(1.0, self.rate or 1.0)


def read_keys(path: str) -> Mapping[bytes, TenantLimits]:
    """Return the tenants of a file by the digests of their keys. Raises StartupFailed naming line and field."""
    tenants: dict[bytes, TenantLimits] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(read_private(path, SETTING).splitlines(), 1):
        if not line.strip() or line.startswith(b"#"):
            continue
        try:
            limits = msgspec.json.decode(line, type=TenantLimits)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # names the field, and has no value of it
            raise _invalid(path, number, str(error)) from error
        if limits.burst is not None and limits.rate is None:
            raise _invalid(path, number, "burst needs a rate - at `$.burst`")
        if (other := lines.setdefault(limits.name, number)) != number:
            raise _invalid(path, number, f"line {other} has this name - at `$.name`")
        for digest in limits.digests:
            if (first := tenants.setdefault(digest, limits)) is not limits:
                raise _invalid(path, number, f"line {lines[first.name]} has this key - at `$.sha256`")
    if not tenants:
        raise StartupFailed(f"{SETTING} {path} has no key")
    return tenants


def _invalid(path: str, number: int, reason: str) -> StartupFailed:
    return StartupFailed(f"{SETTING} {path}, line {number}: {reason}")


#: How often the file is checked for a change.
_CHECK_S = 1.0


class Tenant:
    """One tenant, for as long as the file has its name. All gateways of a port count its requests together."""

    def __init__(self, limits: TenantLimits, counts: SharedCounts, clock: Callable[[], float]) -> None:
        self.name = limits.name
        self.limits = limits
        self._counts = counts
        self._clock = clock
        self._permits = Permits(clock=clock)
        self._is_removed = False

    def priority(self, wanted: int) -> int:
        """Return the priority, lower first, of a request that asks for `wanted`."""
        return max(wanted, self.limits.priority)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it lasts. Raises ConcurrencyLimitExceeded, RateLimitExceeded: it is not counted."""
        self._check_concurrency()
        self._check_rate()
        place = object()
        self._permits.take(place)
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)
            self._permits.free(place)

    def remove(self) -> None:
        """The file does not have it any more: requests that run are not counted."""
        self._is_removed = True

    def _count(self, change: int) -> None:
        if not self._is_removed:
            self._counts.set_own(self.name, self._counts.own(self.name) + change)

    def _check_concurrency(self) -> None:
        limit = self.limits.concurrency
        if limit is not None and self._counts.total(self.name) >= limit:
            message = f"this API key has {limit} requests in flight, which is its limit"
            raise ConcurrencyLimitExceeded(message, retry_after_s=self._permits.promise())

    def _check_rate(self) -> None:
        """The generic cell rate algorithm: the shared value is when the bucket will be full again."""
        rate = self.limits.rate
        if rate is None:
            return
        now = self._clock()
        full_at = max(self._counts.value(self.name), now)
        wait_s = full_at - now - (self.limits.max_burst - 1) / rate
        if wait_s > 1e-9:  # of the clock's rounding
            message = f"this API key has exceeded its limit of {rate:g} requests per second"
            raise RateLimitExceeded(message, retry_after_s=retry_after(wait_s))
        self._counts.set_value(self.name, full_at + 1 / rate)


class Tenants:
    """The tenants of a file, which is read again when it has changed: a new file that cannot be used is logged, and the
    the previous tenants stay. `clock` is monotonic, the same for all gateways."""

    def __init__(
        self, path: str, counts: SharedCounts | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises StartupFailed."""
        self._path = path
        self._counts = counts or SharedCounts()
        self._clock = clock
        self._version = _version(path)
        self._tenants: dict[str, Tenant] = {}
        self._by_digest: Mapping[bytes, Tenant] = {}
        #: Called with the name of each tenant that the file does not have any more.
        self.on_removed: Callable[[str], None] = lambda _: None
        self.use(read_keys(path))

    def of(self, digest: bytes) -> Tenant | None:
        """Return the tenant whose key has this digest. How long that takes does not depend on how much of a digest is
        right: the table only compares keys whose hashes, by a random key of this process, are equal."""
        return self._by_digest.get(digest)

    async def watch(self) -> None:
        """Read the file again whenever it has changed, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Read the file again if it has changed."""
        version = await asyncio.to_thread(_version, self._path)
        if version == self._version:
            return
        self._version = version  # before it is read: what is replaced meanwhile is read the next time
        try:
            tenants = await asyncio.to_thread(read_keys, self._path)
        except StartupFailed as error:
            logger.error("the new file of %s is not used, the one before is: %s", SETTING, error.message)
            return
        self.use(tenants)
        logger.info("%s %s was read again: %d tenants", SETTING, self._path, len(self._tenants))

    def read(self) -> Mapping[bytes, TenantLimits]:
        """Return what the file says, for `use`. Raises StartupFailed."""
        return read_keys(self._path)

    def use(self, by_digest: Mapping[bytes, TenantLimits]) -> None:
        limits = {each.name: each for each in by_digest.values()}
        self._counts.assign(limits)
        for name in self._tenants.keys() - limits.keys():
            self._tenants.pop(name).remove()
            self.on_removed(name)
        for name, each in limits.items():
            if (tenant := self._tenants.get(name)) is None:
                self._tenants[name] = Tenant(each, self._counts, self._clock)
            else:
                tenant.limits = each
        self._by_digest = {digest: self._tenants[each.name] for digest, each in by_digest.items()}


def _version(path: str) -> tuple[int, ...]:
    """Return what differs when the file has been written or replaced, also behind a symbolic link."""
    try:
        status = os.stat(path)
    except OSError:  # reading it reports the reason
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class Admission:
    """The admitted requests, at most `limit`, and per tenant a share of that. One event loop."""

    def __init__(self, limit: int, *, tenant_share: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._admitted: set[RequestScope] = set()
        self._shares = TenantShares(limit, tenant_share=tenant_share)
        self._permits = Permits(clock=clock)

    @property
    def num_in_flight(self) -> int:
        return len(self._admitted)

    def admit(self, scope: RequestScope) -> None:
        """Admit a request until its scope ends; again for the same one has no effect. Raises MediaOverloaded if
        there is no free slot, ConcurrencyLimitExceeded if its tenant has all that it may have."""
        if scope in self._admitted:
            return
        tenant = "" if scope.tenant is None else scope.tenant.name
        if tenant and self._shares.free_of(tenant) <= 0:
            most = self._shares.most_of(tenant)
            message = f"this API key has {most} requests with media in flight, its share of what the server accepts"
            raise ConcurrencyLimitExceeded(message, retry_after_s=self._permits.promise())
        if self._shares.free <= 0:
            message = "too many concurrent requests with media"
            raise MediaOverloaded(message, retry_after_s=self._permits.promise())
        self._admitted.add(scope)
        self._shares.add(tenant, 1)
        self._permits.take(scope)
        scope.defer(lambda: self._end(scope, tenant))

    def _end(self, scope: RequestScope, tenant: str) -> None:
        self._admitted.discard(scope)
        self._shares.add(tenant, -1)
        self._permits.free(scope)


class SharedCounts:
    """The counts of gateway `index` of `num_gateways`, which share the file at `path`; without a path, its own.

    Numbers that the gateways of one port count together, in memory that all of them map. A connection belongs to one
    gateway, and connections are spread unevenly: to divide a limit by the number of gateways would lower it, as a
    client with one connection would have a part of it. Each name has a row: a value that any gateway sets, and a count
    for each gateway that only this one changes. A row is found by a hash of the name, so gateways need not exchange its
    place. There are no locks, which a stopped process would hold for ever: reads and writes of eight aligned bytes are
    atomic, and if two gateways set a value in the same microsecond, one of the two changes is lost. A gateway that
    starts sets its counts to 0, whatever the one before it has left.
    """

    def __init__(self, path: str = "", *, index: int = 0, num_gateways: int = 1) -> None:
        """Raises StartupFailed."""
        self._index, self._width = 1 + index, 1 + num_gateways
        self._rows: dict[str, int] = {}
        size = _NUM_ROWS * self._width * _FLOAT_BYTES
        self._values = memoryview(_mapped(path, size) if path else mmap.mmap(-1, size)).cast("d")
        self.assign(())

    def assign(self, names: Iterable[str]) -> None:
        """Give each name, besides the constant ones, its row, the same one in every gateway with the same names; of
        names that hash to one row, all but the first get the next free one. Own counts move along, counts of other
        names end."""
        counts = {name: self.own(name) for name in self._rows}
        for name in counts:
            self.set_own(name, 0)
        taken: set[int] = set()
        self._rows = {}
        for name in sorted({QUEUED_REQUESTS, QUEUED_BYTES, PREPARING, PREPARED, WAITING, *names}):
            row = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % _NUM_ROWS
            while row in taken:
                row = (row + 1) % _NUM_ROWS
            taken.add(row)
            self._rows[name] = row * self._width
            self.set_own(name, counts.get(name, 0))

    def value(self, name: str) -> float:
        return self._values[self._rows[name]]

    def set_value(self, name: str, value: float) -> None:
        self._values[self._rows[name]] = value

    def own(self, name: str) -> int:
        return int(self._values[self._rows[name] + self._index])

    def set_own(self, name: str, count: int) -> None:
        self._values[self._rows[name] + self._index] = count

    def total(self, name: str) -> int:
        """Return the sum of all gateways' counts."""
        row = self._rows[name]
        return int(sum(self._values[row + 1 : row + self._width]))

    def is_turn(self, name: str, now: float, *, turn_s: float) -> bool:
        """Return whether it is the turn of this gateway, by a clock that all have in common: this one, and each other
        that has a count, have turns of `turn_s`. Their order is that of a hash: one after the other would be in step
        with workers that report in intervals, so that a worker's reports would always come in the same one's turn."""
        row = self._rows[name]
        others = [at for at in range(1, self._width) if at == self._index or self._values[row + at]]
        return others[crc32(int(now / turn_s).to_bytes(8)) % len(others)] == self._index


def _mapped(path: str, size: int) -> mmap.mmap:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(file, size)
            return mmap.mmap(file, size)
        finally:
            os.close(file)
    except OSError as error:
        raise StartupFailed(
            f"cannot map {path}, by which gateways share limits: {os.strerror(error.errno or 0)}"
        ) from error
