"""What a request reserves in its slot and releases."""

import numpy as np
import pytest
from routing_parts import Choice, RouterParts, scoring_input

from medialane.routing import RoutedRequest, RoutingRequest
from medialane.types.feature import MediaSpan
from medialane.types.request import Endpoint, ModelCard, WorkerLoad

CARD = ModelCard("m", 4096, 16, {}, encoder_cache_tokens=1000)
IDS = np.arange(6, dtype=np.uint64)
REQUEST = RoutingRequest({16: IDS}, 100, (MediaSpan("a", 0, 40),))


class World:
    def __init__(self):
        self.now = 0.0
        parts = RouterParts(clock=lambda: self.now)
        self.state = parts.state
        self.slot = self.state.slots.join(Endpoint("w", "", True, WorkerLoad(), 0, same_host=True, card=CARD))
        self.state.caches.join(0, CARD.encoder_cache_tokens)
        self.state.predictions.join(0, "w")

    def reserve(self):
        choice = Choice(self.slot.number, 0, is_reported=False, longest=0, alternatives=[])
        routed = RoutedRequest(self.state, scoring_input(REQUEST, lambda _item: 0, candidates=1), choice, self.slot)
        routed.begin()
        return routed

    def taken(self):
        """In flight, queued, pending blocks, holders of the item."""
        self.state.pending.expire()
        pending = sum(length for length, _ in self.state.pending.prefixes(IDS, 1))
        return self.slot.num_in_flight, self.slot.num_queued, pending, self.state.caches.holders("a")


@pytest.fixture
def world():
    return World()


def test_request_is_counted_in_queue_in_flight_and_both_caches(world):
    world.reserve()
    assert world.taken() == (1, 1, 6, 1)
    assert world.slot.queued_ms > 0


def test_first_token_ends_queueing_and_release_ends_the_rest(world):
    reservation = world.reserve()
    for _ in range(2):
        reservation.prefilled(0)
        assert world.taken() == (1, 0, 6, 1)
    assert world.slot.queued_ms == 0
    for _ in range(2):
        reservation.release()
        assert (world.slot.num_in_flight, world.state.caches.holders("a")) == (0, 1)
    world.now += 1  # its events may have been late
    assert world.taken() == (0, 0, 0, 1)


def test_request_ended_before_its_first_token_leaves_no_state(world):
    reservation = world.reserve()
    for _ in range(2):
        reservation.release()
        reservation.prefilled(0)
        assert world.taken() == (0, 0, 0, 0)


@pytest.mark.parametrize("is_computed", [True, False])
def test_announced_request_counts_at_another_gateway_until_its_first_token(world, is_computed):
    there, sent, ended = World(), [], []
    reservation = world.reserve()
    reservation.announce(lambda work: sent.append(work) or ended.append)
    announced = there.state.announced(there.slot, *sent)
    assert there.taken() == world.taken() == (1, 1, 6, 1)
    assert there.slot.queued_ms == world.slot.queued_ms
    if is_computed:
        reservation.prefilled(0)
    reservation.release()
    assert ended == [is_computed]
    for _ in range(2):
        announced.end(is_computed=is_computed)
        assert there.taken() == (0, 0, 6 * is_computed, int(is_computed))
    there.now += 1  # its events may have been late
    assert there.taken() == (0, 0, 0, int(is_computed))


def test_removed_slot_is_not_updated_even_if_its_number_is_reused(world):
    reservation = world.reserve()
    state = world.state
    state.slots.leave(world.slot)
    state.pending.clear(0)
    state.caches.leave(0)
    state.predictions.leave(0)
    other = state.slots.join(Endpoint("v", "", True, WorkerLoad(), 0, same_host=True, card=CARD))
    state.caches.join(0, CARD.encoder_cache_tokens)
    state.predictions.join(0, "v")
    world.slot = other
    world.reserve()
    reservation.prefilled(0)
    reservation.release()
    assert world.taken() == (1, 1, 6, 1)
