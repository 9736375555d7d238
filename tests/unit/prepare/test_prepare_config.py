import os

import pytest

from medialane.prepare import PrepareConfig
from medialane.types.errors import StartupFailed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_preparers", -1),
        ("queue_limit", 0),
        ("queue_timeout_s", 0.0),
        ("image_timeout_s", -1.0),
        ("start_timeout_s", 0.0),
        ("memory_limit_bytes", -1),
        ("max_jobs_per_preparer", -1),
        ("max_preparer_age_s", -1.0),
    ],
)
def test_invalid_value_is_rejected_by_name(name, value):
    with pytest.raises(StartupFailed, match=name):
        PrepareConfig(**{name: value}).validate()


def test_defaults_are_valid():
    PrepareConfig().validate()


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 1), (8, 7)])
def test_default_number_leaves_one_core_and_is_at_least_one(monkeypatch, cores, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert PrepareConfig().resolved_num_preparers() == expected


def test_given_number_is_used():
    assert PrepareConfig(num_preparers=5).resolved_num_preparers() == 5


def test_each_modality_has_its_own_timeout():
    config = PrepareConfig(image_timeout_s=1, audio_timeout_s=2, video_timeout_s=3)
    assert [config.job_timeout_s(m) for m in ("image", "audio", "video")] == [1, 2, 3]
