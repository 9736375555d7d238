"""Predictions of cached tokens against what engines report: counters, warnings, and cases that are no misprediction."""

import logging

import numpy as np
import pytest
from routing_parts import Prediction, PredictionMonitor

from builders import Clock

BLOCK = 16


class World:
    """One worker in slot 0 that is sent prompts of four blocks; it reports the first `held` as stored."""

    def __init__(self):
        self.clock = Clock()
        self.held = set()
        self.watch = PredictionMonitor(lambda slot, block: (slot, block) in self.held, clock=self.clock)
        self.watch.join(0, "w")
        self.num_sent = 0

    def serve(self, *, predicted=0, held=None, reported=0, is_reported=True):
        """Predicted, held and reported are numbers of blocks."""
        self.num_sent += 1
        ids = np.arange(4, dtype=np.uint64) + np.uint64(1000 * self.num_sent)
        self.held |= {(0, block) for block in ids[: predicted if held is None else held].tolist()}
        self.watch.compare(Prediction(0, ids, BLOCK, predicted, is_reported), reported * BLOCK)

    @property
    def counts(self):
        return self.watch.counts.num_fewer, self.watch.counts.num_more


@pytest.fixture
def world(caplog):
    caplog.set_level(logging.WARNING, "medialane.routing.routed_request")
    return World()


@pytest.mark.parametrize("num_blocks", [0, 3, 4])
def test_as_many_as_predicted_are_counted_as_neither(world, num_blocks):
    world.serve(predicted=num_blocks, reported=num_blocks)
    assert world.counts == (0, 0)


def test_worker_not_using_its_reported_blocks_causes_a_warning(world, caplog):
    for _ in range(8):
        world.serve(predicted=3, reported=0)
    assert world.counts == (8, 0)
    assert "worker w does not cache as predicted: for 8 of its last 8 requests" in caplog.text


def test_worker_using_blocks_that_it_has_not_reported_causes_a_warning(world, caplog):
    for _ in range(8):
        world.serve(reported=3)
    assert world.counts == (0, 8)
    assert len(caplog.records) == 1


def test_warning_is_not_repeated_within_minutes(world, caplog):
    for _ in range(20):
        world.serve(predicted=3)
    assert len(caplog.records) == 1
    world.clock.now += 300
    world.serve(predicted=3)
    assert len(caplog.records) == 2


def test_occasional_mispredictions_cause_no_warning(world, caplog):
    for number in range(60):
        world.serve(predicted=3, reported=0 if number % 3 == 0 else 3)
    assert world.counts == (20, 0)
    assert not caplog.records


def test_eviction_before_the_prefill_is_no_misprediction(world):
    world.serve(predicted=3, held=2, reported=2)
    world.serve(predicted=3, held=0, reported=0)
    assert world.counts == (0, 0)


def test_blocks_reported_between_choice_and_prefill_are_no_misprediction(world):
    world.serve(predicted=0, held=4, reported=4)
    assert world.counts == (0, 0)


def test_prefixes_of_requests_in_flight_are_not_judged(world):
    world.serve(predicted=3, reported=0, is_reported=False)
    world.serve(predicted=1, reported=4, is_reported=False)
    assert world.counts == (0, 0)


def test_one_block_less_than_predicted_is_tolerated(world):
    world.serve(predicted=3, reported=2)
    assert world.counts == (0, 0)


def test_prompt_without_a_full_block_is_neither(world):
    world.watch.compare(Prediction(0, np.empty(0, np.uint64), BLOCK, 0, is_reported=True), 7)
    assert world.counts == (0, 0)


def test_worker_in_the_slot_of_another_one_begins_anew(world, caplog):
    for _ in range(7):
        world.serve(predicted=3)
    world.watch.leave(0)
    world.watch.join(0, "other")
    world.serve(predicted=3)
    assert not caplog.records
