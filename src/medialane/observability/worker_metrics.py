"""A worker's Prometheus series, read in the worker and exposed by its gateways.

Theory of operation. vLLM registers an engine's metrics in the process that embeds it, the worker. When a gateway is
scraped, it queries its workers; each reads its registry and sends the samples that have changed since that gateway's
last query (`MetricReader`, one per connection), and the gateway keeps the latest values (`MetricMirror`, one per
connection). Values are absolute, so a late response cannot corrupt them, and the counters of one incarnation of a
worker never decrease. A new connection starts with all series.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import METRIC_TYPES, Metric

from medialane.types.stats import MetricChanges, MetricFamily, MetricSeries, ProcessKind

#: Only vLLM's metrics: `process_` and `python_` would be mistaken for the gateway's own.
PREFIX = "vllm:"

#: The label with the worker's address, as in medialane's own metrics.
WORKER_LABEL = "worker"

#: Most series of one worker. vLLM has about 1300 per data-parallel rank.
MAX_SERIES = 1 << 16

#: Series in one message: a gateway applies them in a millisecond.
PIECE_SERIES = 2048

#: Added to vLLM's help texts of times that begin when the worker gets the request.
_LEFT_OUT = dict.fromkeys(
    (f"{PREFIX}time_to_first_token_seconds", f"{PREFIX}e2e_request_latency_seconds"),
    " Begins at the worker: upload, media and queues of the gateway are left out"
    " (medialane_time_to_first_token_seconds and medialane_request_seconds have them).",
)

#: Names are validated because the exposition format does not escape them (label values are quoted).
_NAME = re.compile(PREFIX + r"[a-zA-Z0-9_:]+", re.ASCII)
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)

_ID = np.dtype("<u4")
_VALUE = np.dtype("<f8")

_Key = tuple[str, tuple[tuple[str, str], ...]]


class MetricReader:
    """Tracks which changes of a registry's `PREFIX` families one gateway has not been sent yet. Series above
    `max_series` are left out and counted in `num_dropped`. `memory` returns the worker's processes' memory."""

    def __init__(
        self,
        registry: CollectorRegistry,
        memory: Callable[[], Mapping[ProcessKind, int]] = dict,
        *,
        max_series: int = MAX_SERIES,
    ) -> None:
        self._registry = registry
        self._memory = memory
        self._max_series = max_series
        self._families: dict[str, int] = {}
        self._ids: dict[_Key, int] = {}
        self._values: dict[int, float] = {}
        self._num_sent = 0
        self.num_dropped = 0

    def read(self) -> list[MetricChanges]:
        """Return the changes since the last call, as messages of at most `PIECE_SERIES` series; takes a few
        milliseconds. Must not be called concurrently."""
        families: list[MetricFamily] = []
        series: list[MetricSeries] = []
        changed: dict[int, float] = {}
        left = dict.fromkeys(self._ids)
        for metric in self._registry.collect():
            if not metric.name.startswith(PREFIX):
                continue
            family = self._family(metric, families)
            for sample in metric.samples:
                key = (sample.name, tuple(sample.labels.items()))
                left.pop(key, None)
                number = self._ids.get(key)
                if number is None:
                    if len(self._ids) >= self._max_series:
                        self.num_dropped += 1
                        continue
                    number = self._ids[key] = self._num_sent
                    self._num_sent += 1
                    series.append(MetricSeries(family, sample.name, dict(sample.labels)))
                if self._values.get(number) != sample.value:
                    self._values[number] = changed[number] = sample.value
        first, *others = _pieces(families, series, changed, self._forget(left))
        return [msgspec.structs.replace(first, memory=self._memory()), *others]

    def _family(self, metric: Metric, families: list[MetricFamily]) -> int:
        number = self._families.get(metric.name)
        if number is None:
            number = self._families[metric.name] = len(self._families)
            families.append(MetricFamily(metric.name, metric.documentation, metric.type))
        return number

    def _forget(self, keys: Iterable[_Key]) -> list[int]:
        numbers = [self._ids.pop(key) for key in keys]
        for number in numbers:
            self._values.pop(number, None)
        return numbers


class MetricMirror:
    """The latest known series of one worker. Written on the event loop, read from any thread."""

    def __init__(self, *, max_series: int = MAX_SERIES) -> None:
        self._max_series = max_series
        self._families: list[MetricFamily] = []
        self._series: dict[int, MetricSeries] = {}
        self._values: dict[int, float] = {}
        self._num_sent = 0
        #: Memory of the worker's processes, in bytes.
        self.memory: Mapping[ProcessKind, int] = {}

    def __len__(self) -> int:
        return len(self._values)

    def apply(self, changes: MetricChanges) -> None:
        """Apply changes, in the order in which they were sent. Raises ValueError, having changed nothing, if no
        `MetricReader` could have sent them."""
        ids, values = list(map(int, _unpack(changes.ids, _ID))), _unpack(changes.values, _VALUE)
        removed = set(map(int, _unpack(changes.removed, _ID)))
        num_families = len(self._families) + len(changes.families)
        new = dict(enumerate(changes.series, self._num_sent))
        if num_families > self._max_series or len(self._series) + len(new) - len(removed) > self._max_series:
            raise ValueError("too many series")
        if not all(map(_is_family, changes.families)) or not all(_is_series(s, num_families) for s in changes.series):
            raise ValueError("invalid metric family or series")
        if len(ids) != len(values) or any(i not in self._series and i not in new for i in (*ids, *removed)):
            raise ValueError("values do not match the series")
        self.memory = changes.memory or self.memory
        self._families.extend(changes.families)
        self._series.update(new)
        self._num_sent += len(new)
        self._values.update(zip(ids, values, strict=True))
        for number in removed:
            self._series.pop(number, None)
            self._values.pop(number, None)

    def samples(self) -> Iterator[tuple[MetricFamily, MetricSeries, float]]:
        """Yield all series that have a value, in the order in which they were sent."""
        for number, value in sorted(self._values.items()):  # an atomic copy: the event loop may change the dict
            series = self._series.get(number)
            if series is not None:
                yield self._families[series.family], series, value


def engine_metrics(mirrors: Mapping[str, MetricMirror]) -> Iterator[Metric]:
    """Yield the families of all workers, each once, with the worker's address as a label."""
    merged: dict[str, Metric] = {}
    for worker, mirror in mirrors.items():
        for family, series, value in mirror.samples():
            metric = merged.get(family.name)
            if metric is None:
                text = family.documentation + _LEFT_OUT.get(family.name, "")
                metric = merged[family.name] = Metric(family.name, text, family.kind)
            metric.add_sample(series.name, {**series.labels, WORKER_LABEL: worker}, value)
    yield from merged.values()


def _pieces(
    families: list[MetricFamily], series: list[MetricSeries], changed: dict[int, float], removed: list[int]
) -> Iterator[MetricChanges]:
    """Yield messages: new families in the first one, and values after their series."""
    ids = np.fromiter(changed, _ID, len(changed))
    values = np.fromiter(changed.values(), _VALUE, len(changed))
    for start in range(0, max(1, len(series)), PIECE_SERIES):
        new = tuple(series[start : start + PIECE_SERIES])
        gone = b"" if start else np.array(removed, _ID).tobytes()
        yield MetricChanges(() if start else tuple(families), new, removed=gone)
    for start in range(0, len(ids), PIECE_SERIES):
        end = start + PIECE_SERIES
        yield MetricChanges(ids=ids[start:end].tobytes(), values=values[start:end].tobytes())


def _is_family(family: MetricFamily) -> bool:
    return _NAME.fullmatch(family.name) is not None and family.kind in METRIC_TYPES


def _is_series(series: MetricSeries, num_families: int) -> bool:
    names = _NAME.fullmatch(series.name) is not None and all(map(_LABEL.fullmatch, series.labels))
    return names and 0 <= series.family < num_families


def _unpack(data: bytes, kind: np.dtype[np.uint32] | np.dtype[np.float64]) -> list[float]:
    if len(data) % kind.itemsize:
        raise ValueError("truncated number")
    numbers: list[float] = np.frombuffer(data, kind).tolist()
    return numbers
