from medialane.runtime.tasks import Backoff


def test_delays_double_up_to_the_cap_and_reset():
    backoff = Backoff(initial_s=1, max_s=5)
    assert [backoff.next() for _ in range(5)] == [1, 2, 4, 5, 5]
    backoff.reset()
    assert [backoff.next() for _ in range(2)] == [1, 2]
