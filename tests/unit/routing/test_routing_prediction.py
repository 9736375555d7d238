"""Evaluation of predictions: counters, warnings, and cases that must not raise a false alarm."""

import logging

import numpy as np
import pytest
from routing_parts import PredictionMonitor

from builders import Clock

BLOCK = 16


class World:
    """One worker in slot 0 that is sent prompts of four blocks."""

    def __init__(self):
        self.clock = Clock()
        self.watch = PredictionMonitor(grace_s=10, clock=self.clock)
        self.watch.join(0, "w")
        self.num_sent = 0

    def send(self, *, held=0, is_reported=True):
        self.num_sent += 1
        ids = np.arange(4, dtype=np.uint64) + np.uint64(1000 * self.num_sent)
        return ids, self.watch.sent(0, ids, block_size=BLOCK, num_usable=4, num_held=held, is_reported=is_reported)

    def serve(self, *, held=0, reported=None, stores=True, is_reported=True):
        ids, expected = self.send(held=held, is_reported=is_reported)
        self.watch.prefilled(expected, held * BLOCK if reported is None else reported)
        if stores:
            self.watch.stored(0, ids)
        self.wait(11)

    def wait(self, seconds):
        self.clock.now += seconds
        self.watch.look()

    @property
    def counts(self):
        return self.watch.counts


@pytest.fixture
def world(caplog):
    caplog.set_level(logging.WARNING, "medialane.routing.prediction")
    return World()


def test_arriving_blocks_confirm_the_prediction(world):
    world.serve()
    assert (world.counts.num_stored, world.counts.num_never_stored) == (1, 0)


def test_missing_blocks_are_counted_after_the_grace_period(world):
    _, expected = world.send()
    world.watch.prefilled(expected, 0)
    world.wait(9)
    assert world.counts.num_never_stored == 0
    world.wait(2)
    assert world.counts.num_never_stored == 1


def test_worker_with_missing_blocks_causes_a_warning(world, caplog):
    for _ in range(8):
        world.serve(stores=False)
    assert world.counts.num_warnings == 1
    assert "worker w does not cache as predicted: 8 of the last 8" in caplog.text


def test_warning_is_not_repeated_within_minutes(world, caplog):
    for _ in range(20):
        world.serve(stores=False)
    assert world.counts.num_warnings == 1
    world.wait(300)
    world.serve(stores=False)
    assert world.counts.num_warnings == 2


def test_worker_not_using_its_reported_blocks_causes_a_warning(world):
    for _ in range(16):
        world.serve(held=3, reported=0)
    assert world.counts.num_unexplained == 16
    assert world.counts.num_warnings == 1


def test_occasional_mispredictions_cause_no_warning(world):
    for number in range(60):
        world.serve(held=3, stores=number % 3 != 0)
    assert world.counts.num_never_stored == 20
    assert world.counts.num_warnings == 0


def test_eviction_before_the_prefill_is_no_false_alarm(world):
    for _ in range(20):
        ids, expected = world.send(held=3)
        world.watch.removed(0, np.array([ids[2], 77], np.uint64))
        world.watch.prefilled(expected, 0)
        world.watch.stored(0, ids)
        world.wait(11)
    assert (world.counts.num_unexplained, world.counts.num_warnings) == (0, 0)


def test_eviction_after_the_store_is_no_false_alarm(world):
    for _ in range(20):
        ids, expected = world.send()
        world.watch.stored(0, ids)
        world.watch.removed(0, ids)
        world.watch.prefilled(expected, 0)
        world.wait(11)
    assert (world.counts.num_stored, world.counts.num_warnings) == (20, 0)


def test_pending_blocks_are_not_held_against_the_worker(world):
    for _ in range(20):
        world.serve(held=3, reported=0, is_reported=False)
    assert (world.counts.num_unexplained, world.counts.num_warnings) == (0, 0)


def test_one_block_less_than_predicted_is_tolerated(world):
    world.serve(held=3, reported=2 * BLOCK)
    assert world.counts.num_unexplained == 0


def test_already_cached_prompt_needs_no_event(world):
    for _ in range(20):
        world.serve(held=0, reported=4 * BLOCK, stores=False)
    assert world.counts.num_never_stored == 0


def test_engine_without_cached_token_counts_is_judged_by_its_blocks(world):
    ids, expected = world.send()
    world.watch.prefilled(expected, None)
    world.watch.stored(0, ids)
    world.wait(11)
    assert (world.counts.num_unexplained, world.counts.num_stored) == (0, 1)


def test_early_ended_request_is_not_evaluated(world):
    for _ in range(20):
        _, expected = world.send(held=2)
        world.watch.drop(expected)
        world.watch.drop(expected)
    world.wait(100)
    assert world.counts.num_never_stored == 0


def test_snapshot_ends_evaluations_in_flight(world):
    _, expected = world.send(held=2)
    world.watch.forget_all(0)
    world.watch.prefilled(expected, 0)
    world.wait(11)
    assert (world.counts.num_unexplained, world.counts.num_never_stored) == (0, 0)


def test_same_prompt_twice_is_confirmed_twice(world):
    ids = np.array([1, 2, 3], np.uint64)
    both = [world.watch.sent(0, ids, block_size=BLOCK, num_usable=3, num_held=0, is_reported=False) for _ in range(2)]
    world.watch.stored(0, ids)
    for expected in both:
        world.watch.prefilled(expected, 0)
    world.wait(11)
    assert world.counts.num_stored == 2


def test_prompt_without_a_full_block_awaits_no_event(world):
    expected = world.watch.sent(
        0, np.empty(0, np.uint64), block_size=BLOCK, num_usable=0, num_held=0, is_reported=False
    )
    world.watch.prefilled(expected, 0)
    world.wait(11)
    assert (world.counts.num_stored, world.counts.num_never_stored) == (0, 0)


def test_request_of_a_removed_slot_is_not_evaluated(world):
    _, expected = world.send(held=2)
    world.watch.leave(0)
    world.watch.join(0, "other")
    world.watch.prefilled(expected, 0)
    world.wait(11)
    assert world.counts.num_unexplained == 0
