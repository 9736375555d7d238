import sys
from pathlib import Path

import pytest

from medialane.testing.simulated import SimulatedConfig

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from simulated_encoders import EncoderScheduler, EncodeStep, encode_step_s


def scheduler(*items, max_embeds=100):
    found = EncoderScheduler(max_embeds=max_embeds)
    for name, num_embeds in items:
        found.add(name, num_embeds)
    return found


def steps(found):
    return [step.mm_hashes for step in iter(found.step, None)]


def test_items_of_all_requests_are_batched_in_order():
    found = scheduler(("a", 40), ("b", 40), ("c", 40), ("d", 60))
    assert found.step() == EncodeStep(("a", "b"), 80)
    assert steps(found) == [("c", "d")]


def test_item_larger_than_a_step_is_encoded_alone():
    assert steps(scheduler(("a", 1), ("large", 500), ("b", 1))) == [("a",), ("large",), ("b",)]


def test_large_item_is_not_overtaken():
    assert steps(scheduler(("a", 60), ("b", 60), ("c", 10))) == [("a",), ("b", "c")]


def test_step_costs_a_fixed_time_and_that_of_its_embeddings():
    config = SimulatedConfig(embedding_ms=0.1, load_ms_per_mib=2.0, embedding_bytes=1 << 20)
    one, ten = (encode_step_s(config, EncodeStep(("a",), num_embeds)) for num_embeds in (1, 10))
    assert ten - one == pytest.approx(9 * (0.1 + 2.0) / 1000)
    assert one > 0.0021
