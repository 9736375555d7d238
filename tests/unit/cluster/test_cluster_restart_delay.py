from medialane.cluster import Restarts
from medialane.config import ClusterConfig


class Exits:
    """A process that exits when a test says so."""

    def __init__(self):
        self.now_s = 0.0
        self._restarts = Restarts(ClusterConfig(), clock=lambda: self.now_s)

    def after(self, uptime_s, *, ready):
        self.now_s += uptime_s
        return self._restarts.delay_s(was_ready=ready)


def test_process_that_had_become_ready_is_restarted_at_once():
    exits = Exits()
    assert [exits.after(61, ready=True) for _ in range(3)] == [0, 0, 0]


def test_five_kills_within_a_minute_cost_eleven_seconds():
    exits = Exits()
    assert [exits.after(9, ready=True) for _ in range(5)] == [0, 1, 2, 4, 4]


def test_process_that_never_becomes_ready_waits_longer_each_time():
    exits = Exits()
    assert [exits.after(5, ready=False) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]


def test_failed_restart_counts_as_an_exit():
    exits = Exits()
    assert [exits.after(1, ready=ready) for ready in (True, False, True)] == [0, 1, 2]


def test_quiet_minute_ends_the_backoff():
    exits = Exits()
    assert [exits.after(5, ready=False) for _ in range(3)] == [1, 2, 4]
    assert exits.after(60, ready=False) == 1
