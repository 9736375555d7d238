"""The timeline of a request: when its steps were and how long they took, also of each of its media items in the
store and its preparers; cache hits and misses, copied bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

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
#: `prefill`: only their ends distinguish decode from process, and queue from prefill.
LiveStep = Literal[StepName, "prepare", "answer"]
CacheOutcome = Literal["hit", "miss", "mixed", "none"]

#: Steps that a timeline keeps with their start: of a beam search, which routes each token, not all are kept.
MAX_STEPS = 32


class Step:
    """One step: `started_at` by time.perf_counter of this process. `detail` is what its part of the gateway has to say
    about it."""

    __slots__ = ("detail", "name", "seconds", "started_at")

    def __init__(self, name: StepName, started_at: float, seconds: float = 0.0) -> None:
        self.name = name
        self.started_at = started_at
        self.seconds = seconds
        self.detail: object = None


class ReportedStep(msgspec.Struct, frozen=True, array_like=True):
    """A step in another process, which began `ago_s` before the report was made: clocks need not agree."""

    name: StepName
    seconds: float
    ago_s: float


class TimelineReport(msgspec.Struct, frozen=True, array_like=True):
    """A timeline as sent to another process. `media_bytes` is the size of the encoded item, 0 if it was not needed."""

    steps: Annotated[tuple[ReportedStep, ...], msgspec.Meta(max_length=MAX_STEPS)] = ()
    num_hits: int = 0
    num_misses: int = 0
    copied_bytes: int = 0
    media_bytes: int = 0


class RequestTimeline:
    """Seconds by step. Items of one request run concurrently: a step's time is its slowest item's.

    `num_embeddings` counts items whose embedding was found, `media_bytes` is the size of the encoded item, if it is one
    item's timeline. `current` is the step that was entered last, at `entered_at`.
    """

    def __init__(self) -> None:
        self.started_at = self.entered_at = time.perf_counter()
        self.current: LiveStep = "upload"
        self.seconds: dict[StepName, float] = {}
        self.steps: list[Step] = []
        self.num_hits = 0
        self.num_misses = 0
        self.num_embeddings = 0
        self.copied_bytes = 0
        self.media_bytes = 0

    def add(self, name: StepName, seconds: float, started_at: float | None = None) -> None:
        """Record that one item spent `seconds` in a step; without `started_at`, only how long."""
        if started_at is not None:
            self._keep(Step(name, started_at, seconds))
        self._slowest(name, seconds)

    def enter(self, name: LiveStep) -> None:
        """Record what is waited for from now on."""
        self.current, self.entered_at = name, time.perf_counter()

    @property
    def current_ms(self) -> float:
        """Milliseconds since `current` was entered."""
        return (time.perf_counter() - self.entered_at) * 1000

    def report(self) -> TimelineReport:
        now = time.perf_counter()
        steps = tuple(ReportedStep(step.name, step.seconds, now - step.started_at) for step in self.steps)
        return TimelineReport(steps, self.num_hits, self.num_misses, self.copied_bytes, self.media_bytes)

    def merge(self, report: TimelineReport) -> None:
        """Add the part of the request that another process has done until now."""
        now = time.perf_counter()
        for name, seconds, ago_s in ((step.name, step.seconds, step.ago_s) for step in report.steps):
            self.add(name, seconds, now - ago_s)
        self.num_hits += report.num_hits
        self.num_misses += report.num_misses
        self.copied_bytes += report.copied_bytes
        self.media_bytes = report.media_bytes or self.media_bytes

    @contextmanager
    def measure(self, name: StepName) -> Iterator[Step]:
        step = Step(name, time.perf_counter())
        self.current, self.entered_at = name, step.started_at
        try:
            yield step
        finally:
            step.seconds = time.perf_counter() - step.started_at
            self._keep(step)
            self._slowest(name, step.seconds)

    def absorb(self, part: RequestTimeline) -> None:
        """Add what an item has taken, without its steps."""
        for name, seconds in part.seconds.items():
            self._slowest(name, seconds)
        self.num_hits += part.num_hits
        self.num_misses += part.num_misses
        self.copied_bytes += part.copied_bytes

    @property
    def cache(self) -> CacheOutcome:
        if not self.num_hits:
            return "miss" if self.num_misses else "none"
        return "mixed" if self.num_misses else "hit"

    def server_timing(self) -> str:
        """Return the value of a Server-Timing header (https://www.w3.org/TR/server-timing/), durations in ms."""
        entries = [f"{name};dur={seconds * 1000:.2f}" for name, seconds in self.seconds.items()]
        entries.append(f'cache;desc="{self.cache}"')
        if self.num_embeddings:
            entries.append(f'embeddings;desc="{self.num_embeddings}"')
        entries.append(f'copied;desc="{self.copied_bytes}"')
        entries.append(f"total;dur={(time.perf_counter() - self.started_at) * 1000:.2f}")
        return ", ".join(entries)

    def _keep(self, step: Step) -> None:
        if len(self.steps) < MAX_STEPS:
            self.steps.append(step)

    def _slowest(self, name: StepName, seconds: float) -> None:
        self.seconds[name] = max(seconds, self.seconds.get(name, 0.0))
