"""The timeline of a request: durations of its steps, cache hits and misses, copied bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec

StepName = Literal[
    "upload",
    "intake",
    "admission",
    "fetch",
    "decode",
    "process",
    "assemble",
    "encode",
    "route",
    "handover",
    "queue",
    "prefill",
    "first_token",
]
#: What a request waits for. While a preparer has an item it is `prepare`, and until the first token, at the worker,
#: `prefill`: only their ends tell decode from process, and queue from prefill.
LiveStage = Literal[StepName, "prepare", "answer"]
CacheOutcome = Literal["hit", "miss", "mixed", "none"]


class TimelineReport(msgspec.Struct, frozen=True, array_like=True):
    """A timeline as sent to another process."""

    seconds: dict[StepName, float] = {}
    num_hits: int = 0
    num_misses: int = 0
    copied_bytes: int = 0


class StageTimeline:
    """Seconds by stage. Items of one request run concurrently: a stage's time is that of its slowest item.

    `num_embeddings` counts items that were found encoded. `current` is the stage that was entered last, at
    `entered_at`.
    """

    def __init__(self) -> None:
        self.started_at = self.entered_at = time.perf_counter()
        self.current: LiveStage = "upload"
        self.seconds: dict[StepName, float] = {}
        self.num_hits = 0
        self.num_misses = 0
        self.num_embeddings = 0
        self.copied_bytes = 0

    def add(self, stage: StepName, seconds: float) -> None:
        """Record that one item spent `seconds` in `stage`."""
        self.seconds[stage] = max(seconds, self.seconds.get(stage, 0.0))

    def enter(self, stage: LiveStage) -> None:
        """Record what is waited for from now on."""
        self.current, self.entered_at = stage, time.perf_counter()

    @property
    def current_ms(self) -> float:
        """Milliseconds since `current` was entered."""
        return (time.perf_counter() - self.entered_at) * 1000

    def report(self) -> TimelineReport:
        return TimelineReport(self.seconds, self.num_hits, self.num_misses, self.copied_bytes)

    def merge(self, report: TimelineReport) -> None:
        """Add the part of the request that another process has done."""
        for stage, seconds in report.seconds.items():
            self.add(stage, seconds)
        self.num_hits += report.num_hits
        self.num_misses += report.num_misses
        self.copied_bytes += report.copied_bytes

    @contextmanager
    def measure(self, stage: StepName) -> Iterator[None]:
        self.current, self.entered_at = stage, (started := time.perf_counter())
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - started)

    @property
    def cache(self) -> CacheOutcome:
        if not self.num_hits:
            return "miss" if self.num_misses else "none"
        return "mixed" if self.num_misses else "hit"

    def server_timing(self) -> str:
        """Return the value of a Server-Timing header (https://www.w3.org/TR/server-timing/), durations in ms."""
        entries = [f"{stage};dur={seconds * 1000:.2f}" for stage, seconds in self.seconds.items()]
        entries.append(f'cache;desc="{self.cache}"')
        if self.num_embeddings:
            entries.append(f'embeddings;desc="{self.num_embeddings}"')
        entries.append(f'copied;desc="{self.copied_bytes}"')
        entries.append(f"total;dur={(time.perf_counter() - self.started_at) * 1000:.2f}")
        return ", ".join(entries)
