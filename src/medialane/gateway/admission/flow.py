"""Requests of one tenant, without media or with them, from their headers to their ends: how many there are, how fast
they are served, and whether one more is accepted.

Theory of operation. Nothing is forecast: while requests of a flow wait, the times from one that is served to the next
are measured, and a new one waits as long as the last ones took, as many as are ahead of it: then a hiccup counts once.
So does a stall while it lasts: it is expected to last as long again. A request is refused, by its header,

* if that is longer than it may wait: its limit of the time to first token, less what requests have lately taken from
  being sent to their first token; else the operator's patience. What drains in time is no overload.
* if the queue stands (RFC 8289): for `_INTERVAL_S` the wait was never less than `_TARGET_S`. From then on no more
  requests are in flight than when that was found. A batch that is sent at once is accepted, and so is whoever waits for
  an answer before the next request; whoever sends at a rate that is too high is not. Each such refusal lowers the
  bound while the queue stands, each request that is served raises it while it does not, and it ends when it has refused
  none for `_CALM_S`.

Flows have no clock and no loop: times are seconds of any one clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Final, Literal, NamedTuple

#: The longest wait in a queue that does not stand, and for how long it must exceed that.
_TARGET_S: Final = 0.5
_INTERVAL_S: Final = 1.0
#: After this many seconds without a refusal by the bound, there is none.
_CALM_S: Final = 2.0
#: Beyond the requests in flight when it is found to stand: the noise of clients that wait for their answers.
_SLACK: Final = 4
#: Fewest and most times from one request that is served to the next, of which the pace is the mean.
_FEWEST: Final = 40
_MOST: Final = 1024
#: Requests that must have been served, while others waited, before a wait is computed.
_ENOUGH: Final = 4
#: A pace that was measured longer ago says nothing.
_STALE_S: Final = 10.0
#: A header is followed by its body within this time, or by one of a slow client, for which no other is refused.
_BODY_S: Final = 2.0
#: Weight of the newest time from being sent to the first token, and how many mean deviations are added to their mean.
_NEWEST: Final = 0.1
_DEVIATIONS: Final = 2.0

#: What requests wait for.
Resource = Literal["engine", "preparer"]


class Refusal(NamedTuple):
    """Why a request is refused: in how many seconds what is ahead of it will have been served, and whether by its own
    limit or patience (`is_late`), or because the queue stands."""

    wait_s: float
    is_late: bool


class Lane:
    """Requests of a flow that wait for one resource, and the measured pace at which they get it."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, float] = {}  # since when, in the order of arrival
        self._served_s = deque([0.0], 1 + _MOST)  # after how many seconds in which others waited each was served
        self._served_at = float("-inf")  # or when the first began to wait

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Hashable, now: float) -> None:
        if not self._waiting:
            if now - self._served_at > _STALE_S:
                self._served_s = deque([0.0], 1 + _MOST)
            self._served_at = now
        self._waiting[request] = now

    def leave(self, request: Hashable, now: float, *, is_served: bool) -> None:
        """Remove a request that is served, or will not be."""
        since = self._waiting.pop(request)
        if is_served:
            if since != self._served_at:  # it has waited for the whole time since the last was served
                self._served_s.append(self._served_s[-1] + now - self._served_at)
            self._served_at = now

    def head_s(self, now: float) -> float:
        """Return how long the oldest request has waited; 0 if none waits."""
        return now - next(iter(self._waiting.values())) if self._waiting else 0.0

    def pace_s(self, num_ahead: int) -> float:
        """Return the mean time from one request that is served to the next, while others wait, of that many or
        `_FEWEST`; 0 if that is not known."""
        num = min(max(num_ahead, _FEWEST), len(self._served_s) - 1)
        return 0.0 if num < _ENOUGH else (self._served_s[-1] - self._served_s[-1 - num]) / num

    def wait_s(self, now: float, num_ahead: int) -> float:
        """Return how long a request waits behind that many others, if any wait here; 0 if that is not known, or
        none had to for a while."""
        pace_s = self.pace_s(num_ahead)
        next_s = pace_s - (now - self._served_at)
        return num_ahead * pace_s + abs(next_s) if self._waiting and pace_s else max(0.0, next_s)


class Flow:
    """Requests of `tenant` (empty: of clients without one), with media or without."""

    def __init__(self, tenant: str, *, is_media: bool) -> None:
        self.tenant = tenant
        self.is_media = is_media
        self.lanes: dict[Resource, Lane] = {"engine": Lane(), "preparer": Lane()}
        self._accepted: set[Hashable] = set()
        self._arriving: dict[Hashable, float] = {}
        self._pending: set[Hashable] = set()
        self._first_token_s: float | None = None
        self._deviation_s = 0.0
        self._stands_since: float | None = None
        self._bound: float | None = None
        self._refused_at = 0.0

    @property
    def num_in_flight(self) -> int:
        """Accepted requests that have not ended."""
        return len(self._accepted)

    def accept(self, request: Hashable, now: float, patience_s: float, limit_s: float | None = None) -> Refusal | None:
        """Count a request that has arrived, until `end`; or return why it is refused. It may wait for `patience_s`, and
        is to have its first token within `limit_s`."""
        wait_s = self.wait_s(now)
        may_wait_s = patience_s if limit_s is None else min(patience_s, limit_s - self.first_token_s)
        if wait_s and wait_s > may_wait_s:
            return Refusal(wait_s - may_wait_s, is_late=True)
        self._look(now)
        if self._bound is not None and self.num_in_flight >= self._bound:
            self._refused_at = now
            if self._stands_since is not None:
                self._bound = max(1, self.num_in_flight - 1)
            return Refusal(wait_s, is_late=False)
        self._accepted.add(request)
        self._arriving[request] = now
        self._pending.add(request)
        return None

    def arrived(self, request: Hashable) -> None:
        """The whole of a request is there. Idempotent."""
        self._arriving.pop(request, None)

    def sent(self, request: Hashable, now: float) -> None:
        """An engine has a request, which so waits no more. Idempotent."""
        self._arriving.pop(request, None)
        if request in self._pending:
            self._pending.discard(request)
            self._look(now)
            if self._bound is not None and self._stands_since is None:
                self._bound += 1

    def end(self, request: Hashable) -> None:
        """Forget a request that was accepted. Idempotent."""
        self._arriving.pop(request, None)
        self._pending.discard(request)
        self._accepted.discard(request)

    def answered(self, seconds: float) -> None:
        """Learn how long a request has taken from being sent to its first token."""
        if self._first_token_s is None:
            self._first_token_s = seconds
        self._deviation_s += _NEWEST * (abs(seconds - self._first_token_s) - self._deviation_s)
        self._first_token_s += _NEWEST * (seconds - self._first_token_s)

    @property
    def first_token_s(self) -> float:
        """How long nearly all requests take from being sent to their first token; 0 before any was."""
        return 0.0 if self._first_token_s is None else self._first_token_s + _DEVIATIONS * self._deviation_s

    def wait_s(self, now: float) -> float:
        """Return how long a request that arrives now waits, by the pace of the last ones; 0 while none has to."""
        num_slow = 0
        for since in self._arriving.values():
            if now - since <= _BODY_S:
                break
            num_slow += 1
        return max(lane.wait_s(now, len(self._pending) - num_slow) for lane in self.lanes.values())

    def pace_s(self) -> float:
        return max([lane.pace_s(len(lane)) for lane in self.lanes.values() if len(lane)], default=0.0)

    def head_s(self, now: float) -> float:
        """Return how long the oldest of its requests has waited for one resource."""
        return max(lane.head_s(now) for lane in self.lanes.values())

    def _look(self, now: float) -> None:
        """Find whether the queue stands, and so whether there is a bound."""
        if (self.wait_s(now) or self.head_s(now)) <= _TARGET_S:
            self._stands_since = None
        elif self._stands_since is None:
            self._stands_since = now
        if self._bound is not None:
            if now - self._refused_at > _CALM_S and self._stands_since is None:
                self._bound = None
        elif self._stands_since is not None and now - self._stands_since >= _INTERVAL_S:
            self._bound = self.num_in_flight + _SLACK
            self._refused_at = now
