import pytest

from medialane.prepare.job_queue import INITIAL_S, WorkEstimate


def test_estimate_follows_the_items_of_each_modality():
    estimate = WorkEstimate()
    for _ in range(100):
        estimate.learn("image", 0.05)
        estimate.learn("video", 4.0)
    assert estimate.seconds("image") == pytest.approx(0.05)
    assert estimate.seconds("video") == pytest.approx(4.0)
    for _ in range(100):
        estimate.learn("image", 0.2)
    assert estimate.seconds("image") == pytest.approx(0.2, rel=0.01)
    assert estimate.seconds("video") == pytest.approx(4.0)


def test_unknown_modality_counts_like_all_items_together():
    estimate = WorkEstimate()
    assert estimate.seconds("audio") == INITIAL_S
    for _ in range(100):
        estimate.learn("image", 1.0)
    assert estimate.seconds("audio") == pytest.approx(1.0, rel=0.01)


def test_first_item_sets_the_estimate_of_its_modality():
    estimate = WorkEstimate()
    estimate.learn("video", 3.0)
    assert estimate.seconds("video") == 3.0
