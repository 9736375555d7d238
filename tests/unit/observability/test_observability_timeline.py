"""Timings of a request."""

import re
import time

import msgspec
import pytest

from medialane.observability import MAX_STEPS, RequestTimeline, TimelineReport


def test_stage_of_concurrent_items_takes_as_long_as_its_longest():
    timeline = RequestTimeline()
    for seconds in (0.2, 0.5, 0.1):
        timeline.add("decode", seconds)
    assert timeline.seconds == {"decode": 0.5}


def test_failed_stage_is_measured():
    timeline = RequestTimeline()
    with pytest.raises(KeyError), timeline.measure("fetch"):
        raise KeyError
    assert timeline.seconds["fetch"] > 0


@pytest.mark.parametrize(
    ("num_hits", "num_misses", "outcome"), [(0, 0, "none"), (2, 0, "hit"), (0, 1, "miss"), (1, 1, "mixed")]
)
def test_cache_outcome(num_hits, num_misses, outcome):
    timeline = RequestTimeline()
    timeline.num_hits, timeline.num_misses = num_hits, num_misses
    assert timeline.cache == outcome


def test_part_done_by_another_process_is_added():
    timeline, other = RequestTimeline(), RequestTimeline()
    now = time.perf_counter()
    for one, seconds in ((timeline, 0.2), (other, 0.5)):
        one.add("decode", seconds, now - 1)
    timeline.add("fetch", 0.3)
    other.add("fetch", 0.1, now - 2)
    other.add("process", 0.4, now - 0.5)
    timeline.num_hits, timeline.copied_bytes = 1, 10
    other.num_hits, other.num_misses, other.copied_bytes = 2, 3, 5
    report = msgspec.msgpack.decode(msgspec.msgpack.encode(other.report()), type=TimelineReport)
    timeline.merge(report)
    assert timeline.seconds == {"decode": 0.5, "fetch": 0.3, "process": 0.4}
    assert (timeline.num_hits, timeline.num_misses, timeline.copied_bytes) == (3, 3, 15)
    starts = {(step.name, step.seconds): now - step.started_at for step in timeline.steps}
    assert starts == pytest.approx(
        {("decode", 0.2): 1, ("decode", 0.5): 1, ("fetch", 0.1): 2, ("process", 0.4): 0.5}, abs=0.1
    )


def test_steps_of_a_long_request_are_not_all_kept():
    timeline = RequestTimeline()
    for _ in range(2 * MAX_STEPS):
        with timeline.measure("route"):
            pass
    assert len(timeline.steps) == MAX_STEPS
    assert len(timeline.report().steps) == MAX_STEPS


def test_empty_report_changes_nothing():
    timeline = RequestTimeline()
    timeline.merge(RequestTimeline().report())
    assert (timeline.seconds, timeline.cache, timeline.copied_bytes) == ({}, "none", 0)


def test_server_timing_is_a_list_of_metrics_in_milliseconds():
    timeline = RequestTimeline()
    timeline.add("fetch", 0.0125)
    timeline.copied_bytes = 7
    assert "embeddings" not in timeline.server_timing()
    timeline.num_embeddings = 2
    header = timeline.server_timing()
    assert header.startswith("fetch;dur=12.50, ")
    assert 'embeddings;desc="2"' in header
    assert 'copied;desc="7"' in header
    token = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
    assert all(re.fullmatch(rf'{token};(dur=[0-9.]+|desc="[^"]*")', metric) for metric in header.split(", "))
    assert float(re.search(r"total;dur=([0-9.]+)", header)[1]) >= 0
