"""What one client may still read or write."""

from __future__ import annotations

import pytest

from medialane.store import HeldEntry
from medialane.store.client_use import ClientUse
from medialane.types.errors import ProtocolViolation
from medialane.types.tensor import ArenaRange


class Pin:
    def __init__(self) -> None:
        self.num_releases = 0

    def release(self) -> None:
        self.num_releases += 1


class Reservation:
    def __init__(self) -> None:
        self.num_abandons = 0

    def abandon(self) -> None:
        self.num_abandons += 1


ENTRY = HeldEntry(ArenaRange("0" * 32, 4096, 64, 1))


def no_claim(entry):
    raise AssertionError(f"{entry} is known")


def test_each_lease_is_released_once():
    use, pins = ClientUse(), [Pin() for _ in range(3)]
    first, second, _ = [use.hold(pin) for pin in pins]
    use.release(first)
    assert [pin.num_releases for pin in pins] == [1, 0, 0]
    use.end()
    use.end()
    assert [pin.num_releases for pin in pins] == [1, 1, 1]
    assert first != second
    assert not len(use)


def test_release_of_an_unknown_hold_is_a_violation():
    use = ClientUse()
    held = use.hold(Pin())
    use.release(held)
    for unknown in (held, 99, -1):
        with pytest.raises(ProtocolViolation):
            use.release(unknown)


def test_a_client_that_returns_keeps_only_what_it_names_and_has_stopped_writing():
    use, kept, dropped, writing = ClientUse(), Pin(), Pin(), Reservation()
    hold_id = use.hold(kept)
    use.hold(dropped)
    use.start_writing(writing)
    use.keep_only({hold_id: ENTRY}, claim=no_claim)
    assert (kept.num_releases, dropped.num_releases, writing.num_abandons) == (0, 1, 1)
    assert not use.stop_writing(writing), "it has ended"


def test_ids_are_not_reused_after_a_return():
    use = ClientUse()
    ids = {use.hold(Pin()) for _ in range(3)}
    use.keep_only({}, claim=no_claim)
    assert use.hold(Pin()) not in ids


def test_the_writer_gets_its_reservation_back():
    use, writing = ClientUse(), Reservation()
    use.start_writing(writing)
    assert use.stop_writing(writing)
    use.end()
    assert not writing.num_abandons
