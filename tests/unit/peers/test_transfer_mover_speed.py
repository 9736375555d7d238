"""The choice of the faster mover."""

import random

import pytest

from medialane.peers.mover_speed import MIN_BYTES, NUM_TRIALS, REPEAT_INTERVAL, TRIAL_INTERVAL, MoverSpeed

BOTH = ("nixl", "tcp")
LARGE = 16 * MIN_BYTES


@pytest.fixture
def speed():
    return MoverSpeed()


class Link:
    """Copies of entries by the mover that is tried first, at speeds relative to that of tcp. Durations vary by a
    lognormal factor of `sigma`; one of `stalls` copies takes 10 times as long."""

    def __init__(self, speed, *, nixl, peer="a", num_bytes=LARGE, sigma=0.0, stalls=0.0, seed=0):
        self.speed, self.peer, self.num_bytes = speed, peer, num_bytes
        self.gain = {"nixl": nixl, "tcp": 1.0}
        self.load = 1.0
        self._sigma, self._stalls = sigma, stalls
        self._random = random.Random(seed)

    def first(self):
        return self.speed.order(self.peer, BOTH, self.num_bytes)[0]

    def finish(self, name):
        factor = self._random.lognormvariate(0, self._sigma) * (10 if self._random.random() < self._stalls else 1)
        duration_s = self.load * factor * self.num_bytes / (1e9 * self.gain[name])
        self.speed.copied(self.peer, BOTH, name, num_bytes=self.num_bytes, duration_s=duration_s)

    def copy(self, times):
        """Return the movers that were used."""
        used = []
        for _ in range(times):
            used.append(self.first())
            self.finish(used[-1])
        return used

    def measured(self):
        self.copy(2 * (NUM_TRIALS + 1))
        return self


def share_of_nixl(**link):
    """Return the share of entries that are copied by nixl once it is measured, of many links."""
    used = []
    for seed in range(100):
        used += Link(MoverSpeed(), seed=seed, **link).measured().copy(400)
    return used.count("nixl") / len(used)


def test_each_mover_is_measured_before_one_is_chosen(speed):
    used = Link(speed, nixl=2).copy(2 * (NUM_TRIALS + 1))
    assert used.count("nixl") == used.count("tcp") == NUM_TRIALS + 1


@pytest.mark.parametrize(("nixl", "chosen"), [(2, "nixl"), (0.5, "tcp"), (1, "tcp"), (1.05, "tcp")])
def test_other_mover_is_chosen_only_where_it_is_faster_than_tcp(speed, nixl, chosen):
    link = Link(speed, nixl=nixl).measured()
    assert set(link.copy(TRIAL_INTERVAL)) == {chosen}
    assert sorted(speed.order("a", BOTH, LARGE)) == sorted(BOTH), "the other one is the fallback"


NOISES = [{"sigma": 0.3}, {"sigma": 0.5}, {"sigma": 0.2, "stalls": 0.2}]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("nixl", [0.65, 0.75])
def test_slower_mover_is_not_chosen_by_chance(noise, nixl):
    assert share_of_nixl(nixl=nixl, **noise) < 0.06, "trials included"


@pytest.mark.parametrize("noise", NOISES)
def test_much_faster_mover_is_found_in_noise(noise):
    assert share_of_nixl(nixl=3, **noise) > 0.85


def test_load_that_changes_between_trials_does_not_change_the_choice(speed):
    link = Link(speed, nixl=0.8).measured()
    for load in range(2, 12):  # all earlier copies by nixl, and those of the trials before, were faster
        link.load = load
        assert link.copy(TRIAL_INTERVAL + 2).count("nixl") == 1, "that of the trial"


def test_small_entries_are_copied_by_tcp(speed):
    Link(speed, nixl=2, num_bytes=MIN_BYTES).measured()
    assert Link(speed, nixl=2, num_bytes=MIN_BYTES).first() == "nixl"
    small = Link(speed, nixl=2, num_bytes=MIN_BYTES - 1)
    assert set(small.copy(100)) == {"tcp"}
    assert speed.order("a", BOTH, 1000) == ["tcp", "nixl"]


def test_sizes_are_measured_separately(speed):
    """A mover that takes long to start is the faster one only for large entries."""
    Link(speed, nixl=0.5, num_bytes=5 * MIN_BYTES).measured()
    Link(speed, nixl=2, num_bytes=150 * MIN_BYTES).measured()
    assert speed.order("a", BOTH, 4 * MIN_BYTES)[0] == "tcp"
    assert speed.order("a", BOTH, 1000 * MIN_BYTES)[0] == "nixl"


def test_time_of_the_first_copies_is_not_counted(speed):
    link = Link(speed, nixl=1e-9)
    link.copy(2)
    link.gain["nixl"] = 2
    link.copy(2 * NUM_TRIALS)
    assert link.first() == "nixl"


def test_slower_mover_is_measured_again_now_and_then(speed):
    used = Link(speed, nixl=2).measured().copy(3 * (TRIAL_INTERVAL + 2))
    assert used.count("tcp") == 3


@pytest.mark.parametrize(("before", "after", "chosen"), [(2, 0.1, "tcp"), (0.1, 2, "nixl")])
def test_choice_follows_a_change(speed, before, after, chosen):
    link = Link(speed, nixl=before).measured()
    link.gain["nixl"] = after
    link.copy(TRIAL_INTERVAL + (REPEAT_INTERVAL + 2) * NUM_TRIALS)
    assert link.first() == chosen


def test_one_trial_that_was_disturbed_does_not_change_the_choice(speed):
    link = Link(speed, nixl=2).measured()
    link.copy(TRIAL_INTERVAL)
    link.gain["nixl"] = 0.1
    link.copy(2)
    link.gain["nixl"] = 2
    assert set(link.copy(REPEAT_INTERVAL)) == {"nixl"}
    assert link.copy(2 + TRIAL_INTERVAL).count("tcp") == 1, "it is repeated soon, and not again"


def test_concurrent_entries_of_a_trial_are_distributed(speed):
    link = Link(speed, nixl=2)
    assert sorted(link.first() for _ in range(8)) == ["nixl"] * 4 + ["tcp"] * 4


def test_trial_ends_without_a_result_when_a_mover_is_avoided(speed):
    """A later copy by it is not compared with one of before."""
    link = Link(speed, nixl=2)
    link.finish("nixl")
    speed.copied("a", ("tcp",), "tcp", num_bytes=LARGE, duration_s=1)
    used = link.copy(2 * (NUM_TRIALS + 1))
    assert used.count("nixl") == NUM_TRIALS + 1, "it was not counted"


def test_peers_are_measured_separately(speed):
    Link(speed, nixl=2).measured()
    assert set(Link(speed, nixl=0.5, peer="b").copy(2)) == set(BOTH)


def test_only_mover_is_used(speed):
    assert speed.order("a", ("tcp",), LARGE) == ["tcp"]
    assert speed.order("a", (), LARGE) == []
