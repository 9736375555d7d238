import time

import pytest

from medialane.vllm_bridge.engine.embedding_connector import StepClock


class Kernel:
    """The number of times that the thread was preempted, and the time."""

    num_preempted, now = 0, 100.0

    def step_clock(self):
        return StepClock(clock=lambda: self.now, num_preempted=lambda: self.num_preempted)


@pytest.fixture
def kernel():
    return Kernel()


def spend(clock, kernel, *calls):
    """A step of calls, each of which takes some time, and may be preempted meanwhile."""
    for seconds, is_preempted in calls:
        with clock.measure():
            kernel.now += seconds
            kernel.num_preempted += is_preempted
    kernel.now += 50
    clock.end_step()


def test_longest_step_is_the_largest_sum_of_its_calls(kernel):
    clock = kernel.step_clock()
    for calls in ([(1, 0), (2, 0)], [(2.5, 0)], []):
        spend(clock, kernel, *calls)
    assert clock.longest_s == 3


def test_preempted_call_is_left_out(kernel):
    clock = kernel.step_clock()
    spend(clock, kernel, (1, 0), (9, 1), (1, 0))
    assert clock.longest_s == 2


def test_call_that_waits_or_fails_is_counted():
    clock = StepClock()

    @clock.measure()
    def fail():
        time.sleep(0.005)  # time: what is measured
        raise OSError("full")

    for _ in range(20):  # some may be preempted
        with pytest.raises(OSError, match="full"):
            fail()
        clock.end_step()
    assert clock.longest_s >= 0.005
