"""The gateways that are registered with one worker: each gets the pending work of the others, and changes of load."""

from __future__ import annotations

from itertools import count
from typing import Protocol

import msgspec

from medialane.core.pending_work import PendingWork
from medialane.core.request import EncoderCard
from medialane.wire.protocol import EncoderCleared, Gateways, Pending, PendingEnded


class Member(Protocol):
    """One gateway's session."""

    @property
    def is_slow(self) -> bool:
        """Whether the gateway reads too slowly: messages that can be omitted are."""
        ...

    def send(self, message: msgspec.Struct) -> None: ...

    def load_changed(self) -> None:
        """Report the load soon, if it has changed."""
        ...


class PendingWorkRelay:
    """Used on the event loop."""

    def __init__(self) -> None:
        self._members: dict[Member, None] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._members)

    def join(self, member: Member) -> None:
        self._members[member] = None
        if len(self._members) > 1:
            self._report_count()

    def leave(self, member: Member) -> None:
        """Idempotent."""
        if member in self._members:
            del self._members[member]
            self._report_count()

    def relay(self, sender: Member, work: PendingWork) -> int:
        """Send pending work to the other gateways; return its number there."""
        number = next(self._numbers)
        message = Pending(number, work)
        for member in self._members:
            if member is not sender and not member.is_slow:
                member.send(message)
        return number

    def relay_end(self, sender: Member, number: int, *, is_computed: bool) -> None:
        message = PendingEnded(number, is_computed)
        for member in self._members:
            if member is not sender:
                member.send(message)

    def encoder_cleared(self, encoder: EncoderCard | None) -> None:
        for member in self._members:
            member.send(EncoderCleared(encoder))

    def load_changed(self) -> None:
        for member in self._members:
            member.load_changed()

    def _report_count(self) -> None:
        for member in self._members:
            member.send(Gateways(len(self._members)))
