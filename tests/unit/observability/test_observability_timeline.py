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
    assert re.match(r"upload;dur=[0-9.]+, fetch;dur=12.50, ", header)
    assert 'embeddings;desc="2"' in header
    assert 'copied;desc="7"' in header
    token = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
    assert all(re.fullmatch(rf'{token};(dur=[0-9.]+|desc="[^"]*")', metric) for metric in header.split(", "))
    assert float(re.search(r"total;dur=([0-9.]+)", header)[1]) >= 0


def waited(timeline, seconds):
    """Let so much time pass for the current step."""
    timeline.entered_at -= seconds


def test_request_is_always_in_one_step_and_returns_to_what_it_has_entered():
    timeline = RequestTimeline()
    waited(timeline, 1)
    timeline.enter("parse")
    for _ in range(2):
        with timeline.measure("render"):
            waited(timeline, 2)
            with timeline.measure("store"):
                waited(timeline, 10)
        waited(timeline, 0.5)
    timeline.enter("answer")
    waited(timeline, 4)
    found = timeline.durations()
    assert list(found) == ["upload", "parse", "render", "store", "answer"]
    assert found == pytest.approx({"upload": 1, "parse": 1, "render": 4, "store": 20, "answer": 4}, abs=0.1)


def test_steps_of_a_request_that_has_ended_take_no_more_time():
    timeline = RequestTimeline()
    timeline.end()
    found = timeline.durations()
    waited(timeline, 5)
    timeline.end()
    assert timeline.durations() == found


@pytest.mark.parametrize(
    ("waited_s", "expected"),
    [
        (10, {"answer": 1, "prefill": 3, "queue": 2, "transit": 4}),
        (2.5, {"answer": 1, "prefill": 1.5, "queue": 0, "transit": 0}),
    ],
)
def test_wait_for_a_worker_is_divided_by_what_the_worker_says(waited_s, expected):
    timeline = RequestTimeline()
    timeline.enter("prefill")
    waited(timeline, waited_s)
    timeline.divide({"answer": 1.0, "prefill": 3.0, "queue": 2.0}, rest="transit")
    timeline.enter("answer")
    found = timeline.durations()
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=0.1)
