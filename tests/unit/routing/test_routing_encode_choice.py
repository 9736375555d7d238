"""Where an item is encoded: costs of encoders and of the worker, by their queues."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medialane.routing import EncodeCosts, NewItem, RoutingConfig, choose_encoder, least_loaded

COSTS = EncodeCosts(embed_ms=0.05, request_ms=5.0, load_ms_per_mib=0.1)
IMAGE = NewItem(1000, 8 << 20)
IDLE, BUSY = 0, 20


def test_costs_are_those_of_the_router():
    config = RoutingConfig(encoder_ms_per_token=0.5, request_ms=2.0, load_ms_per_mib=0.25)
    assert EncodeCosts.of(config).encoder_ms(NewItem(10, 4 << 20), 7.0) == 5 + 2 + 1 + 7


def test_without_encoders_the_worker_encodes():
    assert choose_encoder(IMAGE, [], BUSY, COSTS) is None
    assert least_loaded([]) is None


def test_idle_worker_encodes_itself():
    assert choose_encoder(IMAGE, [0.0], IDLE, COSTS) is None


def test_running_sequences_are_not_delayed_while_an_encoder_is_idle():
    assert choose_encoder(IMAGE, [0.0], 2, COSTS) == 0


def test_encoder_with_a_queue_longer_than_all_delays_at_the_worker_is_not_used():
    limit = COSTS.worker_ms(IMAGE, BUSY) - COSTS.encoder_ms(IMAGE, 0.0)
    assert choose_encoder(IMAGE, [limit - 1], BUSY, COSTS) == 0
    assert choose_encoder(IMAGE, [limit + 1], BUSY, COSTS) is None


def test_small_item_is_encoded_at_the_worker_rather_than_by_a_request_of_its_own():
    assert choose_encoder(NewItem(10), [0.0], 2, COSTS) is None


@given(
    st.builds(NewItem, st.integers(1, 20_000), st.integers(0, 1 << 27)),
    st.lists(st.floats(0, 5000), min_size=1),
    st.floats(0, 500),
)
def test_choice_has_the_lowest_cost_of_all(item, queues_ms, num_sequences):
    found = choose_encoder(item, queues_ms, num_sequences, COSTS)
    at_encoders = [COSTS.encoder_ms(item, queue_ms) for queue_ms in queues_ms]
    at_worker = COSTS.worker_ms(item, num_sequences)
    chosen = at_worker if found is None else at_encoders[found]
    assert chosen == pytest.approx(min(at_worker, *at_encoders))
    assert at_encoders[least_loaded(queues_ms)] == min(at_encoders)
