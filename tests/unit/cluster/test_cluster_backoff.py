from medialane.cluster.backoff import Backoff


def test_pauses_double_up_to_the_cap_and_start_over_after_a_stable_life():
    backoff = Backoff(initial_s=1, max_s=5, stable_s=60)
    assert [backoff.after(2) for _ in range(5)] == [1, 2, 4, 5, 5]
    assert backoff.after(60) == 1
    assert backoff.after(59) == 2
