"""Places for concurrent work on media hosts, shared so that a slow host delays only its own.

Theory of operation. A host may take another place while it has at most as many as are free, up to a maximum: its share
shrinks as the places fill, and eight slow hosts are needed to take all. Who waits is served in the order of fewest
places of its host. Waiting has a limit of its own: the time of a fetch does not run meanwhile, and a fetch that gets no
place fails with MediaOverloaded, for which its host is not to blame.

While a host waits, holders slower than the minimum rate lose their places: hosts first that have more places than
the waiting one, hosts with the most places first. Without such need, slowness is no error.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from medialane.types.errors import MediaOverloaded

#: How often places are taken from slow holders while somebody waits: one for each waiting host.
_REVOKE_INTERVAL_S = 0.25

#: Most that wait, as a multiple of the places.
_MAX_WAITING = 8


@dataclass(slots=True)
class FetchTime:
    """The time that a fetch has left: until `deadline`, which waiting for places postpones by up to `wait_s`."""

    deadline: float
    wait_s: float


@dataclass(slots=True, eq=False)
class Place:
    """One place. Its holder counts the bytes that it receives."""

    host: str
    taken_at: float = 0.0
    num_bytes: int = 0
    timeout: asyncio.Timeout | None = None
    is_revoked: bool = False

    def revoke(self) -> None:
        """End the holder's block with MediaOverloaded."""
        if self.timeout is not None and not self.timeout.expired():
            self.is_revoked = True
            self.timeout.reschedule(0.0)


class HostPlaces:
    """`num_places` in all, at most `max_per_host` per host. Used inside a running loop."""

    def __init__(
        self, num_places: int, max_per_host: int, *, min_rate_bytes_per_s: float = 0.0, grace_s: float = 0.0
    ) -> None:
        """Holders of `hold` that receive less than the minimum rate may lose their places after `grace_s`."""
        self._num_places = num_places
        self._max_per_host = max_per_host
        self._min_rate = min_rate_bytes_per_s
        self._grace_s = grace_s
        self._held: set[Place] = set()
        self._num_held: Counter[str] = Counter()
        self._waiting: dict[Place, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def hold(self, host: str, time: FetchTime) -> AsyncIterator[Place]:
        """Hold a place for a block that ends at the deadline. Raises MediaOverloaded, and TimeoutError like
        `asyncio.timeout`."""
        place = await self.take(host, time)
        try:
            async with asyncio.timeout_at(time.deadline) as place.timeout:
                yield place
        except TimeoutError as error:
            if place.is_revoked:
                raise MediaOverloaded("too many media are being fetched, and the media host sends slowly") from error
            raise
        finally:
            self.give_back(place)

    async def take(self, host: str, time: FetchTime) -> Place:
        """Return a place, which the caller gives back; the wait for it postpones the deadline. Raises
        MediaOverloaded."""
        clock = asyncio.get_running_loop().time
        place, started = Place(host), clock()
        if self._fits(place):
            self._grant(place)
        else:
            await self._wait(place, time.wait_s)
        place.taken_at = clock()
        time.deadline += place.taken_at - started
        time.wait_s -= place.taken_at - started
        return place

    def give_back(self, place: Place) -> None:
        self._held.discard(place)
        self._num_held[place.host] -= 1
        if not self._num_held[place.host]:
            del self._num_held[place.host]
        while fitting := [each for each in self._waiting if self._fits(each)]:
            first = min(fitting, key=self._rank)
            self._grant(first)
            if not (granted := self._waiting.pop(first)).done():  # else cancelled: `_wait` gives the place back
                granted.set_result(None)

    def _rank(self, place: Place) -> int:
        return self._num_held[place.host]

    def _fits(self, place: Place) -> bool:
        free = self._num_places - len(self._held)
        return free > 0 and self._rank(place) <= min(self._max_per_host - 1, free)

    def _grant(self, place: Place) -> None:
        self._held.add(place)
        self._num_held[place.host] += 1

    async def _wait(self, place: Place, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        if len(self._waiting) >= _MAX_WAITING * self._num_places:
            raise MediaOverloaded("too many media wait to be fetched")
        granted = self._waiting[place] = loop.create_future()
        if self._timer is None and self._min_rate:
            self._timer = loop.call_later(_REVOKE_INTERVAL_S, self._revoke_slow)
        try:
            async with asyncio.timeout(wait_s):
                await granted
        except BaseException as error:  # cancellation included: nobody else gives the place back
            self._waiting.pop(place, None)
            if place in self._held:
                self.give_back(place)
            if isinstance(error, TimeoutError):
                raise MediaOverloaded("too many media are being fetched") from error
            raise

    def _revoke_slow(self) -> None:
        """Take a place for each waiting host from a slow holder of a host that has more."""
        loop = asyncio.get_running_loop()
        slow = [place for place in self._held if self._is_slow(place, loop.time())]
        slow.sort(key=lambda place: (self._rank(place), -place.taken_at))
        hosts = {place.host: place for place in self._waiting if self._rank(place) < self._max_per_host}
        for place in sorted(hosts.values(), key=self._rank):
            if slow and self._rank(slow[-1]) > self._rank(place):
                slow.pop().revoke()
        self._timer = loop.call_later(_REVOKE_INTERVAL_S, self._revoke_slow) if self._waiting else None

    def _is_slow(self, place: Place, now: float) -> bool:
        held_s = now - place.taken_at
        return held_s > self._grace_s and place.num_bytes < held_s * self._min_rate and not place.is_revoked
