from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_parts import RouterParts, scoring_input

from medialane.routing import RoutingConfig, RoutingRequest
from medialane.types.request import Endpoint, WorkerLoad

NAMES = ["cost", "round-robin", "random", "least-loaded", "prefix-only"]


class World:
    def __init__(self, name, loads, *, temperature_ms=0.0, seed=7):
        config = RoutingConfig(running_ms=1.0, temperature_ms=temperature_ms)
        parts = RouterParts(config)
        self.slots, self.index = parts.slots, parts.index
        for number, load in enumerate(loads):
            self.slots.join(Endpoint(f"w{number}", "", True, WorkerLoad(num_running=load), 0, same_host=True))
        self.policy = parts.policy(name, seed=seed)

    def choose(self, *, prefixes=None, candidates=None):
        ids = np.arange(62, dtype=np.uint64)
        for slot, length in enumerate(prefixes or []):
            self.index.replace(slot, ids[:length])
        mask = self.slots.open if candidates is None else candidates
        return self.policy.choose(scoring_input(RoutingRequest({16: ids}, 1000), candidates=mask))

    def picks(self, count, **kwargs):
        return Counter(self.choose(**kwargs).slot for _ in range(count))


def test_round_robin_visits_all_in_order():
    world = World("round-robin", [5, 0, 0])
    assert [world.choose().slot for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_round_robin_continues_after_the_last_when_candidates_change():
    world = World("round-robin", [0, 0, 0, 0])
    assert [world.choose(candidates=mask).slot for mask in (0b1111, 0b1011, 0b1111, 0b0111)] == [0, 1, 2, 0]


def test_least_loaded_considers_only_sequences():
    assert World("least-loaded", [3, 1, 2]).choose(prefixes=[60, 0, 0]).slot == 1


def test_prefix_only_considers_only_the_prefix():
    assert World("prefix-only", [90, 0, 0]).choose(prefixes=[9, 8, 0]).slot == 0


def test_cost_weighs_both():
    world = World("cost", [30, 0])
    assert world.choose(prefixes=[1, 0]).slot == 1
    assert world.choose(prefixes=[60, 0]).slot == 0


@pytest.mark.parametrize("name", ["cost", "least-loaded", "prefix-only", "round-robin"])
def test_ties_are_broken_round_robin(name):
    assert World(name, [0, 0, 0]).picks(9) == {0: 3, 1: 3, 2: 3}


def test_random_is_uniform_and_reproducible_by_seed():
    picks = World("random", [50, 0]).picks(400)
    assert 150 < picks[0] < 250
    assert World("random", [50, 0]).picks(400) == picks


def test_temperature_spreads_by_weight():
    picks = World("cost", [1, 0], temperature_ms=1.0).picks(1000)
    assert 650 < picks[1] < 810  # 1 / (1 + exp(-1)) = 0.73
    assert World("cost", [40, 0], temperature_ms=1.0).picks(200) == {1: 200}


def test_alternatives_are_the_next_best_in_order():
    choice = World("least-loaded", [4, 1, 3, 2, 0, 9]).choose()
    assert choice.slot == 4
    assert [(slot.number, *rest) for slot, *rest in choice.alternatives] == [(1, 1.0, 0), (3, 2.0, 0), (2, 3.0, 0)]


def test_single_candidate_has_no_alternatives():
    assert World("cost", [0, 0]).choose(candidates=0b10).alternatives == []


@given(st.sampled_from(NAMES), st.lists(st.integers(0, 9), min_size=1, max_size=40), st.data())
def test_only_candidates_are_chosen(name, loads, data):
    world = World(name, loads, temperature_ms=data.draw(st.sampled_from([0.0, 0.5])))
    mask = data.draw(st.integers(1, (1 << len(loads)) - 1))
    prefixes = data.draw(st.lists(st.integers(0, 60), min_size=len(loads), max_size=len(loads)))
    choice = world.choose(prefixes=prefixes, candidates=mask)
    assert mask >> choice.slot & 1
    others = [slot.number for slot, _, _ in choice.alternatives]
    assert all(mask >> slot & 1 for slot in others)
    assert choice.slot not in others
    scores = [score for _, score, _ in choice.alternatives]
    assert scores == sorted(scores)


@pytest.mark.parametrize("temperature_ms", [0.0, 0.001, 1e6])
def test_non_candidates_are_never_picked(temperature_ms):
    world = World("cost", [0, 200, 0], temperature_ms=temperature_ms)
    assert set(world.picks(50, candidates=0b010)) == {1}


@given(st.lists(st.integers(0, 4), min_size=1, max_size=150), st.data())
def test_least_rotates_among_ties_and_alternatives_follow_sorted(loads, data):
    """Against sorting, over more slots than a word has bits."""
    world, last = World("least-loaded", loads), -1
    for _ in range(5):
        mask = data.draw(st.integers(1, (1 << len(loads)) - 1))
        candidates = [slot for slot in range(len(loads)) if mask >> slot & 1]
        choice = world.choose(candidates=mask)
        least = [slot for slot in candidates if loads[slot] == min(loads[s] for s in candidates)]
        last = next((slot for slot in least if slot > last), least[0])
        assert choice.slot == last
        others = sorted((loads[slot], slot) for slot in candidates if slot != last)
        assert [(score, slot.number) for slot, score, _ in choice.alternatives] == others[:3]
