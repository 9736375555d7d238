"""Prometheus series as sent from a worker to a gateway."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from medialane.core.process.memory import ProcessKind


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """A metric family; `name` as in prometheus_client, without the suffixes of its samples."""

    name: str
    documentation: str
    kind: str


class MetricSeries(msgspec.Struct, frozen=True, array_like=True):
    """One sample's name and labels. `family` is the index of its family in the order in which families were sent."""

    family: int
    name: str
    labels: dict[str, str]


class MetricChanges(msgspec.Struct, frozen=True, array_like=True):
    """Changes since the previous message on this connection; the first message has all series.

    `families` and `series` are new; series are numbered from 0 as they are sent, and no number is reused. `ids` (u32,
    little-endian) are the series whose values have changed, `values` (f64) their new values; `removed` (u32) are series
    that no longer exist. `memory` is that of the worker's processes, in bytes; the first message of a read has it.
    """

    families: tuple[MetricFamily, ...] = ()
    series: tuple[MetricSeries, ...] = ()
    ids: bytes = b""
    values: bytes = b""
    removed: bytes = b""
    memory: Mapping[ProcessKind, int] = {}
