"""Fallback from a mover that fails."""

import pytest

from medialane.transfer.pulls import INITIAL_PAUSE_S, MAX_FAILURES, MAX_PAUSE_S, MoverHealth


@pytest.fixture
def health(clock):
    return MoverHealth(clock)


def test_mover_is_avoided_for_a_time_after_consecutive_failures(health, clock):
    reports = [health.failed("a") for _ in range(MAX_FAILURES)]
    assert reports == [False] * (MAX_FAILURES - 1) + [True], "reported once"
    assert health.is_avoided("a")
    assert not health.is_avoided("b"), "of another peer"
    clock.now += INITIAL_PAUSE_S + 1
    assert not health.is_avoided("a")


def test_success_resets_failures(health):
    health.failed("a")
    health.succeeded("a")
    health.failed("a")
    assert not health.is_avoided("a")


def test_each_further_failure_doubles_the_pause_up_to_a_limit(health, clock):
    for _ in range(MAX_FAILURES + 1):
        health.failed("a")
    clock.now += INITIAL_PAUSE_S + 1
    assert health.is_avoided("a")
    for _ in range(1000):
        health.failed("a")
    clock.now += MAX_PAUSE_S + 1
    assert not health.is_avoided("a")
