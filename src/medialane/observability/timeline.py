"""The timeline of a request: when its steps were and how long they took, also of each of its media items in the
store and its preparers; cache hits and misses, copied bytes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Annotated, Literal, get_args

import msgspec

#: In the order in which they begin.
StepName = Literal[
    "upload", "intake", "open", "admission", "parse", "render", "store", "fetch", "decode", "process", "assemble",
    "encode", "route", "handover", "transit", "queue", "prefill", "first_token", "answer", "response",
]  # fmt: skip
#: What a request waits for. While a preparer has an item it is `prepare`, and until the first token, at the worker,
#: `prefill` (`answer`, if it is not streamed): only their ends distinguish decode from process, and transit and queue
#: from prefill.
LiveStep = Literal[StepName, "prepare"]

STEPS: tuple[StepName, ...] = get_args(StepName)
#: Steps that are parts of others: the first three, each of its slowest item, of `store`; the last one is `transit`,
#: `queue` and `prefill`. All others follow each other without a gap, and add up to the whole request.
INNER_STEPS: frozenset[StepName] = frozenset(("fetch", "decode", "process", "first_token"))
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
    """Seconds by step. Items of one request run concurrently: in `seconds` a step's time is its slowest item's.

    A request itself is always in one step, `current`, since `entered_at`: each mark ends it and begins the next one. It
    is in the step that was entered last, but for what is measured meanwhile.

    `num_embeddings` counts items whose embedding was found, `media_bytes` is the size of the encoded item, if it is one
    item's timeline.
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
        self._entered: LiveStep = "upload"
        self._laps: dict[LiveStep, float] = {}
        self._has_ended = False

    def add(self, name: StepName, seconds: float, started_at: float | None = None) -> None:
        """Record that one item spent `seconds` in a step; without `started_at`, only how long."""
        if started_at is not None:
            self._keep(Step(name, started_at, seconds))
        self._slowest(name, seconds)

    def enter(self, name: LiveStep) -> None:
        """Record what is waited for from now on."""
        self._entered = name
        self._mark(name)

    def divide(self, parts: Mapping[StepName, float], rest: StepName) -> None:
        """Divide the time since the last mark into these seconds, as far as it suffices, and the rest."""
        now = time.perf_counter()
        left = now - self.entered_at
        for name, seconds in parts.items():
            self._lap(name, min(seconds, left))
            left -= min(seconds, left)
        self._lap(rest, left)
        self.entered_at = now

    def end(self) -> None:
        """The request has ended. Idempotent."""
        if not self._has_ended:
            self._mark(self.current)
            self._has_ended = True

    def durations(self) -> dict[StepName, float]:
        """Return the seconds of each step of a request until now, in order."""
        found = dict(self._laps)
        if not self._has_ended:
            found[self.current] = found.get(self.current, 0.0) + time.perf_counter() - self.entered_at
        for name, seconds in self.seconds.items():
            found.setdefault(name, seconds)
        return {name: found[name] for name in STEPS if name in found}

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

    def measure(self, name: StepName) -> AbstractContextManager[Step]:
        """Be in this step during the block."""
        return _Measured(self, name)

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
        total_s = time.perf_counter() - self.started_at
        entries = [f"{name};dur={seconds * 1000:.2f}" for name, seconds in self.durations().items()]
        entries.append(f'cache;desc="{self.cache}"')
        if self.num_embeddings:
            entries.append(f'embeddings;desc="{self.num_embeddings}"')
        entries.append(f'copied;desc="{self.copied_bytes}"')
        entries.append(f"total;dur={total_s * 1000:.2f}")
        return ", ".join(entries)

    def begun(self, name: StepName) -> Step:
        """Begin a step, until `ended`. Called by `measure`."""
        return Step(name, self._mark(name))

    def ended(self, step: Step) -> None:
        """Return to the step that was entered last."""
        step.seconds = self._mark(self._entered) - step.started_at
        self._keep(step)
        self._slowest(step.name, step.seconds)

    def _mark(self, name: LiveStep) -> float:
        """End the current step, and begin this one; return when."""
        now = time.perf_counter()
        self._lap(self.current, now - self.entered_at)
        self.current, self.entered_at = name, now
        return now

    def _lap(self, name: LiveStep, seconds: float) -> None:
        self._laps[name] = self._laps.get(name, 0.0) + seconds

    def _keep(self, step: Step) -> None:
        if len(self.steps) < MAX_STEPS:
            self.steps.append(step)

    def _slowest(self, name: StepName, seconds: float) -> None:
        self.seconds[name] = max(seconds, self.seconds.get(name, 0.0))


class _Measured:
    """The block of `RequestTimeline.measure`. Not a generator, which would double its cost."""

    def __init__(self, timeline: RequestTimeline, name: StepName) -> None:
        self._timeline = timeline
        self._name = name

    def __enter__(self) -> Step:
        self._step = self._timeline.begun(self._name)
        return self._step

    def __exit__(self, *_: object) -> None:
        self._timeline.ended(self._step)
