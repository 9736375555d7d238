"""The choice of the faster mover."""

import pytest

from medialane.transfer.mover_speed import MIN_BYTES, NUM_SAMPLES, REFRESH_INTERVAL, MoverSpeed

BOTH = ("nixl", "tcp")
LARGE = 4 * MIN_BYTES


@pytest.fixture
def speed():
    return MoverSpeed()


def copy(speed, name, bytes_per_s, times=1, peer="a"):
    for _ in range(times):
        speed.copied(peer, BOTH, name, num_bytes=LARGE, duration_s=LARGE / bytes_per_s)


def measured(speed, *, nixl, tcp):
    """Copy as `order` says until both are measured; return which movers were used."""
    used = []
    for _ in range(2 * (NUM_SAMPLES + 1)):
        used.append(speed.order("a", BOTH, LARGE)[0])
        copy(speed, used[-1], {"nixl": nixl, "tcp": tcp}[used[-1]])
    return used


def test_each_mover_is_measured_before_one_is_chosen(speed):
    used = measured(speed, nixl=1e9, tcp=1e9)
    assert used.count("nixl") == used.count("tcp") == NUM_SAMPLES + 1


@pytest.mark.parametrize(
    ("nixl", "tcp", "chosen"), [(2e9, 1e9, "nixl"), (1e9, 2e9, "tcp"), (1e9, 1e9, "tcp"), (1.05e9, 1e9, "tcp")]
)
def test_other_mover_is_chosen_only_where_it_is_faster_than_tcp(speed, nixl, tcp, chosen):
    measured(speed, nixl=nixl, tcp=tcp)
    assert speed.order("a", BOTH, LARGE)[0] == chosen
    assert speed.order("a", BOTH, 1000)[0] == chosen, "also for small entries"
    assert sorted(speed.order("a", BOTH, LARGE)) == sorted(BOTH), "the other one is the fallback"


def test_small_entries_are_copied_by_tcp_until_both_are_measured(speed):
    assert speed.order("a", BOTH, 1000) == ["tcp", "nixl"]
    speed.copied("a", BOTH, "tcp", num_bytes=1000, duration_s=1e-9)
    assert speed.order("a", BOTH, LARGE) == ["nixl", "tcp"], "a small one was not counted"


def test_time_of_the_first_copy_is_not_counted(speed):
    copy(speed, "nixl", 1.0)
    copy(speed, "nixl", 2e9, NUM_SAMPLES)
    copy(speed, "tcp", 1e9, NUM_SAMPLES + 1)
    assert speed.order("a", BOTH, LARGE)[0] == "nixl"


def test_slower_mover_is_measured_again_now_and_then(speed):
    measured(speed, nixl=2e9, tcp=1e9)
    used = []
    for _ in range(3 * REFRESH_INTERVAL):
        used.append(speed.order("a", BOTH, LARGE)[0])
        copy(speed, used[-1], 2e9 if used[-1] == "nixl" else 1e9)
    assert 1 <= used.count("tcp") <= 3


def test_choice_follows_a_change(speed):
    measured(speed, nixl=2e9, tcp=1e9)
    copy(speed, "nixl", 1e8, 10)
    assert speed.order("a", BOTH, LARGE)[0] == "tcp"


def test_peers_are_measured_separately(speed):
    measured(speed, nixl=1e9, tcp=2e9)
    assert speed.order("b", BOTH, LARGE)[0] == "nixl"


def test_only_mover_is_used(speed):
    assert speed.order("a", ("tcp",), LARGE) == ["tcp"]
    assert speed.order("a", (), LARGE) == []
