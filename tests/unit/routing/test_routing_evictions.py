"""What a placement evicts: routers by themselves, and whole simulated clusters that get one request after the other."""

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from medialane.routing import Router, RoutingConfig, RoutingRequest
from medialane.testing.simulated import SimulatedConfig
from medialane.types.kv_blocks import KvChange, prompt_block_ids
from medialane.types.request import Endpoint, ModelCard, WorkerLoad

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from bench_routing import oracle
from simulated_cluster import SimulatedCluster
from traces import PacedTrace, paced_turns

BLOCK = 16
CARD = ModelCard("m", 4096, BLOCK, {}, num_kv_blocks=100, max_num_seqs=64)
COMMON = [7] * 2 * BLOCK


def endpoint(number, *, num_kv_blocks=100):
    card = msgspec.structs.replace(CARD, num_kv_blocks=num_kv_blocks)
    return Endpoint(f"w{number}", "", True, WorkerLoad(), 0, same_host=True, card=card)


def router_of(*sizes):
    router = Router(RoutingConfig())
    for number, size in enumerate(sizes):
        router.join(endpoint(number, num_kv_blocks=size))
    return router


def request(seed, num_blocks, *, prefix=COMMON):
    """A prompt with so many blocks behind its prefix."""
    tokens = prefix + [seed * 1000 + number for number in range(num_blocks * BLOCK)]
    return RoutingRequest({BLOCK: prompt_block_ids(tokens, block_size=BLOCK)}, len(tokens))


def serve(router, asked, *, at=None):
    """A whole request whose worker reports its blocks; return its slot and decision. `at`: the only worker for it."""
    if at is not None:
        others = frozenset(f"w{number}" for number in range(router.num_open) if number != at)
        asked = msgspec.structs.replace(asked, excluded=others)
    routed = router.pick(asked)
    routed.begin()
    routed.prefilled(None)
    routed.release()
    router.change(routed.slot, KvChange(0, np.asarray(asked.block_ids[BLOCK], "<u8").tobytes(), b""))
    return routed.slot, routed.decision


def test_prompt_goes_where_less_was_sent_if_it_is_longer_than_the_prefix_elsewhere():
    router = router_of(100, 100)
    first, _ = serve(router, request(1, 10))
    other, decision = serve(router, request(2, 10))
    assert (first, other) == (0, 1)
    assert decision.reason == "longer prefix elsewhere, but higher load or more evictions"


def test_question_about_a_cached_prompt_stays_although_more_was_sent_there():
    router = router_of(100, 100)
    asked = request(1, 10)
    for each in (asked, request(2, 90)):
        serve(router, each, at=0)
    slot, decision = serve(router, asked)
    assert (slot, decision.cached_tokens) == (0, 11 * BLOCK)


def test_prompts_are_spread_by_the_sizes_of_caches():
    router = router_of(300, 100)
    slots = [serve(router, request(seed, 10))[0] for seed in range(40)]
    assert slots.count(0) == pytest.approx(30, abs=2)


def test_prompts_are_spread_by_their_lengths():
    router = router_of(100, 100)
    slots = [serve(router, request(seed, 3 if seed % 3 else 12))[0] for seed in range(30)]
    sent = [sum(3 if seed % 3 else 12 for seed in range(30) if slots[seed] == slot) for slot in (0, 1)]
    assert abs(sent[0] - sent[1]) <= 12


def test_what_was_sent_counts_less_the_more_is_sent_after_it():
    router = router_of(100, 100)
    serve(router, request(1, 90), at=0)
    for seed in range(2, 300):
        serve(router, request(seed, 5, prefix=[]))
    slots = [serve(router, request(seed, 5, prefix=[]))[0] for seed in range(300, 320)]
    assert slots.count(0) == pytest.approx(10, abs=1)


def test_worker_that_takes_the_number_of_another_has_been_sent_nothing():
    router = router_of(100, 100)
    serve(router, request(1, 50), at=0)
    serve(router, request(2, 5), at=1)
    router.leave(0)
    router.join(endpoint(2))
    assert serve(router, request(3, 30))[0] == 0


def test_workers_that_do_not_report_their_size_evict_nothing():
    router = router_of(0, 0)
    slots, decisions = zip(*(serve(router, request(seed, 10)) for seed in range(8)), strict=True)
    assert set(slots) == {0}
    assert {decision.parts.eviction for decision in decisions} == {0}


def test_decision_says_what_is_evicted_beyond_what_another_worker_would():
    router = router_of(100, 100)
    for slot, num_blocks in ((0, 20), (1, 10)):
        serve(router, request(slot, num_blocks, prefix=[]), at=slot)
    _, decision = serve(router, request(2, 10, prefix=[]), at=0)
    cost_ms = 160 * router.config.prefill_ms_per_token * (1 + router.config.contention_weight)
    assert decision.parts.eviction == pytest.approx((20 / 35 - 10 / 25) * cost_ms, rel=0.1)
    assert decision.parts.total > decision.parts.expected_ms + decision.parts.contention
    slot, decision = serve(router, request(3, 10, prefix=[]))
    assert (slot, decision.parts.eviction) == (1, 0.0)


def test_cached_tokens_count_no_more_if_both_workers_got_as_much():
    router = router_of(100, 100)
    config = router.config
    for slot in (0, 1):
        serve(router, request(slot, 3, prefix=[]), at=slot)
    saved_ms = 2 * BLOCK * config.prefill_ms_per_token * (1 + config.contention_weight)
    router.report(0, WorkerLoad(num_running=round(1.25 * saved_ms / config.running_ms)))
    assert serve(router, request(0, 3, prefix=[]))[0] == 1


def test_prefix_longer_than_what_follows_is_copied_once_it_has_evicted_as_much_as_it_costs():
    """The first requests stay with their common prefix, and then the caches are filled alike."""
    router = router_of(500, 500)
    prefix = list(range(40 * BLOCK))
    slots = [serve(router, request(seed, 5, prefix=prefix))[0] for seed in range(1, 60)]
    second = slots.index(1)
    assert 40 / 5 < second < 2 * 40 / 5
    assert slots[3 * second :].count(1) == pytest.approx(slots[3 * second :].count(0), abs=2)


def test_chat_stays_with_its_worker_although_more_was_sent_there():
    router = router_of(100, 100)
    prefix, slots = list(range(10 * BLOCK)), []
    for turn in range(40):
        prefix = prefix + [turn] * BLOCK
        slots.append(serve(router, request(0, 1, prefix=prefix))[0])
    assert set(slots) == {0}


@pytest.mark.parametrize(
    ("trace", "num_tokens"),
    [
        (PacedTrace(num_rounds=3, num_sets=3), 27_000),
        (PacedTrace(num_rounds=3, num_sets=3, document=(400, 800)), 6_500),
        (PacedTrace(num_rounds=3, num_sets=3, num_documents=13, document=(500, 8000)), 38_000),
        (
            PacedTrace(
                num_rounds=6,
                num_sets=3,
                pace_s=3.0,
                document=(50, 200),
                question=(100, 300),
                answer=(50, 200),
                is_chat=True,
            ),
            17_000,
        ),
    ],
)
def test_documents_that_fit_two_caches_together_are_all_cached_at_one(trace, num_tokens):
    simulated = SimulatedConfig(num_kv_blocks=num_tokens // BLOCK, max_model_len=16384)
    turns = list(paced_turns(trace))
    cluster = SimulatedCluster(2, RoutingConfig(), simulated=simulated)
    outcome = cluster.run(turns)
    assert outcome.cached >= 0.95 * oracle(turns)
    assert outcome.imbalance <= 1.2
