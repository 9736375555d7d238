"""Fallback from a mover that fails."""

import pytest

from medialane.peers.mover_health import INITIAL_PAUSE_S, MAX_FAILURES, MAX_PAUSE_S, MoverHealth

BOTH = {"nixl": b"", "tcp": b""}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def health(clock):
    return MoverHealth(("nixl", "tcp"), clock)


def test_preferred_mover_is_first(health):
    assert health.order("a", BOTH) == ["nixl", "tcp"]


def test_mover_that_one_side_lacks_is_left_out(health):
    assert health.order("a", {"tcp": b"", "other": b""}) == ["tcp"]


def test_mover_is_avoided_for_a_time_after_consecutive_failures(health, clock):
    reports = [health.failed("a", "nixl") for _ in range(MAX_FAILURES)]
    assert reports == [False] * (MAX_FAILURES - 1) + [True], "reported once"
    assert health.order("a", BOTH) == ["tcp"]
    assert health.order("b", BOTH) == ["nixl", "tcp"], "of another peer"
    clock.now += INITIAL_PAUSE_S + 1
    assert health.order("a", BOTH) == ["nixl", "tcp"]


def test_success_resets_failures(health):
    health.failed("a", "nixl")
    health.succeeded("a", "nixl")
    health.failed("a", "nixl")
    assert health.order("a", BOTH) == ["nixl", "tcp"]


def test_each_further_failure_doubles_the_pause_up_to_a_limit(health, clock):
    for _ in range(MAX_FAILURES + 1):
        health.failed("a", "nixl")
    clock.now += INITIAL_PAUSE_S + 1
    assert health.order("a", BOTH) == ["tcp"]
    for _ in range(1000):
        health.failed("a", "nixl")
    clock.now += MAX_PAUSE_S + 1
    assert health.order("a", BOTH) == ["nixl", "tcp"]


def test_last_mover_is_never_avoided(health):
    for _ in range(9):
        health.failed("a", "tcp")
    assert health.order("a", BOTH) == ["nixl", "tcp"]
