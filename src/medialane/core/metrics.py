"""Prometheus series on their way from a worker to a gateway."""

from __future__ import annotations

import msgspec


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """A family as prometheus_client names it: without the suffixes of its samples."""

    name: str
    documentation: str
    kind: str


class MetricSeries(msgspec.Struct, frozen=True, array_like=True):
    """One sample's name and labels. `family` is the family's number: families are numbered as they are sent."""

    family: int
    name: str
    labels: dict[str, str]


class MetricChanges(msgspec.Struct, frozen=True, array_like=True):
    """What has changed since the last ones on this connection; the first ones are everything.

    `families` and `series` are new; series are numbered as they are sent, from 0, and no number is used twice. `ids`
    (u32, little-endian) are the series whose values have changed, `values` (f64) their values now; `removed` (u32) are
    series that exist no more.
    """

    families: tuple[MetricFamily, ...] = ()
    series: tuple[MetricSeries, ...] = ()
    ids: bytes = b""
    values: bytes = b""
    removed: bytes = b""
