"""Costs: the array over all slots agrees with the terms of one slot, and both are monotonic."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_parts import EncoderItem, RouterParts, encoder_items, longest, scoring_input

from medialane.routing import RoutingConfig, RoutingRequest
from medialane.types.feature import MediaSpan
from medialane.types.request import Endpoint, ModelCard, WorkerLoad

BLOCK = 16
CARD = ModelCard("m", 4096, BLOCK, {}, encoder_cache_tokens=10_000, max_num_seqs=8)


def span(name, offset, length, **kwargs):
    return MediaSpan(mm_hash=name, offset=offset, length=length, **kwargs)


class World:
    """Slots with caches, and requests to them."""

    def __init__(self, num_slots, *, remote=(), sizes=None, **config):
        self.config = RoutingConfig(**{"contention_weight": 0.0} | config)
        parts = RouterParts(self.config)
        self.slots, self.caches, self.model, self.index = parts.slots, parts.caches, parts.costs, parts.index
        self.policy = parts.policy("cost")
        for number in range(num_slots):
            card = msgspec.structs.replace(CARD, block_size=sizes[number] if sizes else BLOCK)
            endpoint = Endpoint(
                f"w{number}", "unix:/w", True, WorkerLoad(), 0, same_host=number not in remote, card=card
            )
            self.caches.join(self.slots.join(endpoint).number, CARD.encoder_cache_tokens)

    def scoring_input(self, *, num_tokens=100, media=(), handover_bytes=0, prefixes=None, session_slot=None):
        self.num_tokens = num_tokens
        sizes = dict.fromkeys([BLOCK, *self.slots.block_sizes])
        ids = {size: np.arange(size << 32, (size << 32) + num_tokens // size, dtype=np.uint64) for size in sizes}
        request = RoutingRequest(ids, num_tokens, tuple(media), handover_bytes)
        self.prefixes = prefixes or [0] * len(self.slots)
        for slot, length in enumerate(self.prefixes):
            self.index.replace(slot, ids[self.slots[slot].card.block_size][:length])
        return scoring_input(request, self.caches.holders, candidates=self.slots.open, session_slot=session_slot)

    def costs(self, scoring_input):
        self.choice = self.policy.choose(scoring_input)
        cached = longest([(self.cached_tokens(slot), 1 << slot.number) for slot in self.slots])
        return self.policy.scores(scoring_input, cached)[: len(self.slots)]

    def cached_tokens(self, slot):
        size = slot.card.block_size
        return min(self.prefixes[slot.number], (self.num_tokens - 1) // size) * size

    def hold(self, slot, name, num_embeds):
        self.caches.unpin(slot, self.caches.pin(slot, [(name, num_embeds)]), computed=True)


def test_items_are_distinguished_and_ordered_by_covering_prefix():
    media = [span("a", 4, 28), span("b", 32, 10), span("a", 60, 5, num_embeds=4)]
    assert encoder_items(media) == (EncoderItem("b", 10, 42), EncoderItem("a", 4, 65))


def test_item_ending_at_a_block_boundary_is_covered():
    world = World(1)
    scoring_input = world.scoring_input(media=[span("a", 0, 16)], prefixes=[1])
    tokens = world.policy.choose(scoring_input).tokens
    assert world.model.terms(scoring_input, world.slots[0], tokens).needed == []


@pytest.mark.parametrize("known", [0, 1, 15, 16, 17])
def test_item_of_unknown_position_is_after_all_known_blocks(known):
    (item,) = encoder_items([span("a", known, 0)])
    assert item.num_embeds > 0
    assert item.end > known


def test_cached_tokens_are_not_prefilled():
    world = World(2, prefill_ms_per_token=0.5, request_ms=0)
    assert world.costs(world.scoring_input(num_tokens=100, prefixes=[0, 4])).tolist() == pytest.approx([50, 50 - 32])


def test_item_in_the_encoder_cache_is_not_encoded():
    world = World(2, prefill_ms_per_token=0, encoder_ms_per_token=1.0, request_ms=0)
    world.hold(1, "a", 40)
    assert world.costs(world.scoring_input(media=[span("a", 0, 40), span("b", 40, 10)])).tolist() == [50, 10]


def test_item_within_the_cached_prefix_is_never_encoded():
    world = World(2, prefill_ms_per_token=0, encoder_ms_per_token=1.0, request_ms=0)
    world.hold(1, "a", 40)
    media = [span("a", 0, 40), span("b", 40, 10)]
    assert world.costs(world.scoring_input(media=media, prefixes=[3, 3])).tolist() == [10, 10]


def test_item_with_embeddings_in_the_arena_costs_a_load_at_every_worker():
    world = World(3, prefill_ms_per_token=0, encoder_ms_per_token=1.0, load_ms_per_mib=0.5, request_ms=0)
    world.hold(1, "a", 40)
    media = [span("a", 0, 40, embedding_bytes=4 << 20), span("b", 40, 10)]
    assert world.costs(world.scoring_input(media=media, prefixes=[0, 0, 3])).tolist() == [12, 10, 10]
    decided = world.model.terms(world.scoring_input(media=media), world.slots[0], 0)
    assert (decided.num_to_encode, decided.num_to_load) == (1, 1)
    assert (decided.parts.encoder, decided.parts.load) == (10, 2)


def test_embeddings_are_transferred_to_a_worker_of_another_host_besides_their_load():
    world = World(2, remote=[1], encoder_ms_per_token=1.0, load_ms_per_mib=0.5, remote_ms=2.0, remote_ms_per_mib=3.0)
    media = [span("a", 0, 40, embedding_bytes=4 << 20)]
    local, remote = world.costs(world.scoring_input(media=media, handover_bytes=4 << 20))
    assert remote - local == pytest.approx(2.0 + 4 * 3.0 - 4 * world.config.local_ms_per_mib)
    parts = world.model.terms(world.scoring_input(media=media), world.slots[1], 0).parts
    assert (parts.encoder, parts.load) == (0, 2)


def test_loads_delay_other_requests_as_encoding_does():
    world = World(1, load_ms_per_mib=0.5, request_ms=0, prefill_ms_per_token=0, contention_weight=2.0)
    scoring_input = world.scoring_input(media=[span("a", 0, 40, embedding_bytes=4 << 20)])
    parts = world.model.terms(scoring_input, world.slots[0], 0).parts
    assert (parts.contention, parts.expected_ms) == (4, 2)


def test_item_held_by_many_slots_is_discounted_for_all():
    world = World(40, prefill_ms_per_token=0, encoder_ms_per_token=1.0, request_ms=0)
    for slot in range(0, 40, 2):
        world.hold(slot, "a", 30)
    costs = world.costs(world.scoring_input(media=[span("a", 0, 30)], prefixes=[2] * 4 + [0] * 36))
    assert costs.tolist() == [0] * 4 + [0, 30] * 18


def test_remote_host_costs_by_size():
    world = World(2, remote=[1], local_ms_per_mib=0.1, remote_ms=2.0, remote_ms_per_mib=3.0)
    local, remote = world.costs(world.scoring_input(handover_bytes=4 << 20))
    assert remote - local == pytest.approx(2.0 + 4 * 3.0 - 4 * 0.1)
    local, remote = world.costs(world.scoring_input())
    assert remote == local


def test_session_affinity_is_a_bonus():
    world = World(2, session_ms=3.0)
    plain, last = world.costs(world.scoring_input(session_slot=1))
    assert plain - last == pytest.approx(3.0)


slot_facts = st.fixed_dictionaries(
    {
        "prefix": st.integers(0, 12),
        "size": st.sampled_from([8, BLOCK, 32]),
        "queued": st.floats(0, 500),
        "running": st.integers(0, 12),
        "waiting": st.integers(0, 5),
        "usage": st.floats(0, 1),
        "remote": st.booleans(),
        "holds": st.sets(st.sampled_from("abcdef")),
    }
)
items = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 180), st.integers(1, 20)), max_size=8)
#: Items whose embeddings are in the arena, and their bytes.
embedded = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 1 << 24))


def build(facts, spans, embedding_bytes, handover_bytes, session_slot):
    world = World(
        len(facts),
        remote=[n for n, fact in enumerate(facts) if fact["remote"]],
        sizes=[fact["size"] for fact in facts],
        contention_weight=0.7,
    )
    for number, fact in enumerate(facts):
        slot = world.slots[number]
        slot.load = WorkerLoad(fact["running"], fact["waiting"], fact["usage"])
        world.slots.queue(slot, fact["queued"])
        for name in sorted(fact["holds"]):
            world.hold(number, name, 20)
    for slot in world.slots:  # the mean work of requests moves with each of them
        world.slots.update(slot)
    media = [
        span(name, offset, length, num_embeds=20, embedding_bytes=embedding_bytes.get(name, 0))
        for name, offset, length in spans
    ]
    prefixes = [fact["prefix"] for fact in facts]
    return world, world.scoring_input(
        num_tokens=200, media=media, handover_bytes=handover_bytes, prefixes=prefixes, session_slot=session_slot
    )


@given(
    st.lists(slot_facts, min_size=1, max_size=80), items, embedded, st.integers(0, 1 << 24), st.sampled_from([None, 0])
)
def test_cost_terms_of_each_slot_sum_to_its_cost(facts, spans, embedding_bytes, handover_bytes, session_slot):
    world, scoring_input = build(facts, spans, embedding_bytes, handover_bytes, session_slot)
    costs = world.costs(scoring_input)
    for slot in world.slots:
        cached_tokens = world.cached_tokens(slot)
        assert world.model.terms(scoring_input, slot, cached_tokens).parts.total == pytest.approx(costs[slot.number])
    assert world.choice.longest == max(map(world.cached_tokens, world.slots))
    assert world.choice.tokens == world.cached_tokens(world.slots[world.choice.slot])


WORSE = [
    ("prefix", lambda value: max(0, value - 3)),
    ("queued", lambda value: value + 25),
    ("running", lambda value: value + 2),
    ("waiting", lambda value: value + 2),
    ("usage", lambda value: min(1.0, value + 0.2)),
    ("remote", lambda value: True),
    ("holds", lambda value: set(sorted(value)[1:])),
]


@given(slot_facts, items, embedded, st.integers(0, 1 << 24), st.sampled_from(WORSE))
def test_cost_is_monotonic_in_cached_tokens_and_work(fact, spans, embedding_bytes, handover_bytes, change):
    name, worse = change
    costs = []
    for each in (fact, fact | {name: worse(fact[name])}):
        world, scoring_input = build([each], spans, embedding_bytes, handover_bytes, None)
        costs.append(world.costs(scoring_input)[0])
    assert costs[1] >= costs[0] - 1e-6
