"""The last routing decisions, for diagnosis."""

from __future__ import annotations

import msgspec

from medialane.core.request import RoutingDecision


class DecisionRecord(msgspec.Struct, frozen=True):
    """A decision, when it was made (seconds since the epoch), its request, and the outcome: the cached tokens that the
    engine reported and the milliseconds from the choice to the first token, None until then."""

    number: int
    time_s: float
    request_id: str
    decision: RoutingDecision
    reported_cached_tokens: int | None = None
    first_token_ms: float | None = None


class Decisions:
    """A ring buffer of the last `size` decisions."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ring: list[DecisionRecord] = []
        self._num_added = 0

    def add(self, request_id: str, decision: RoutingDecision, *, time_s: float) -> int:
        """Record a decision and return its number."""
        number = self._num_added
        record = DecisionRecord(number, time_s, request_id, decision)
        if number < self._size:
            self._ring.append(record)
        else:
            self._ring[number % self._size] = record
        self._num_added += 1
        return number

    def prefilled(self, number: int, *, reported_cached_tokens: int | None, first_token_ms: float) -> None:
        """Record the first token of a request; ignored if the decision is no longer in the ring."""
        place = number % self._size
        if place >= len(self._ring) or self._ring[place].number != number:
            return
        self._ring[place] = msgspec.structs.replace(
            self._ring[place], reported_cached_tokens=reported_cached_tokens, first_token_ms=first_token_ms
        )

    def last(self, count: int | None = None) -> list[DecisionRecord]:
        """Return the records, newest first; at most `count`."""
        newest_first = sorted(self._ring, key=lambda record: -record.number)
        return newest_first if count is None else newest_first[:count]
