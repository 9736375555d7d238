"""The last routing decisions, for diagnosis."""

from __future__ import annotations

from itertools import count, islice

import msgspec

from medialane.core.request import RoutingDecision


class DecisionRecord(msgspec.Struct, frozen=True):
    """A decision, when it was made (seconds since the epoch), its request, whether that was sent, and the outcome: the
    cached tokens that the engine reported and the milliseconds from the choice to the first token, None until then."""

    number: int
    time_s: float
    request_id: str
    decision: RoutingDecision
    is_sent: bool = True
    reported_cached_tokens: int | None = None
    first_token_ms: float | None = None


class Decisions:
    """The last `size` decisions, and the number of those whose request ended without having been sent."""

    def __init__(self, size: int) -> None:
        self.num_unsent = 0
        self._size = size
        self._numbers = count()
        self._records: dict[int, DecisionRecord] = {}  # the oldest first

    def add(self, request_id: str, decision: RoutingDecision, *, time_s: float, is_sent: bool = True) -> int:
        """Record a decision and return its number."""
        number = next(self._numbers)
        self._records[number] = DecisionRecord(number, time_s, request_id, decision, is_sent)
        self._records.pop(number - self._size, None)
        return number

    def sent(self, number: int) -> None:
        """Record that the request has been sent; ignored if the decision has been dropped."""
        if (record := self._records.get(number)) is not None:
            self._records[number] = msgspec.structs.replace(record, is_sent=True)

    def prefilled(self, number: int, *, reported_cached_tokens: int | None, first_token_ms: float) -> None:
        """Record the first token of a request; ignored if the decision has been dropped."""
        if (record := self._records.get(number)) is not None:
            self._records[number] = msgspec.structs.replace(
                record, reported_cached_tokens=reported_cached_tokens, first_token_ms=first_token_ms
            )

    def last(self, limit: int | None = None) -> list[DecisionRecord]:
        """Return the records, newest first; at most `limit`."""
        return list(islice(reversed(self._records.values()), limit))
