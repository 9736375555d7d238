"""Charts as SVG. Colours come from the page's style: class `a` is the baseline, `b` the other side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Final, NamedTuple

from medialane.compare.machine import percentile
from medialane.compare.page.scale import Scale, positive_scale

_WIDTH: Final = 560
_HEIGHT: Final = 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 24, 12, 40
_MOST_POINTS: Final = 800
_MOST_BINS: Final = 24
_CLASSES: Final = ("a", "b")
_TIME: Final = "seconds since the start of the turn"

#: How a value is written on an axis.
Text = Callable[[float], str]
#: The values of both sides, the baseline's first.
Pair = tuple[Sequence[float], Sequence[float]]


class Point(NamedTuple):
    x: float
    y: float
    label: str


class Frame(NamedTuple):
    """The axes of a chart, and how their values are written; `label` is that of the horizontal one."""

    x: Scale
    y: Scale
    x_text: Text
    y_text: Text
    label: str

    def axes(self) -> list[str]:
        base, parts = _HEIGHT - _BOTTOM, list[str]()
        for tick in self.y.ticks(5):
            at = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">{self.y_text(tick)}</text>')
        for tick in self.x.ticks(6):
            at = self.x(tick)
            parts.append(f'<line class="tick" x1="{at}" x2="{at}" y1="{base}" y2="{base + 4}"/>')
            parts.append(f'<text x="{at}" y="{base + 17}" text-anchor="middle">{self.x_text(tick)}</text>')
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
        at = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(f'<text class="label" x="{at}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(self.label)}</text>')
        return parts

    def limit(self, value: float) -> list[str]:
        """Mark a value of the horizontal axis, if it is on it."""
        if not self.x.low <= value <= self.x.high:
            return []
        at, base = self.x(value), _HEIGHT - _BOTTOM
        place = f'x="{at - 5}" text-anchor="end"' if at > _WIDTH * 0.75 else f'x="{at + 5}"'
        return [
            f'<line class="limit" x1="{at}" x2="{at}" y1="{_TOP}" y2="{base}"/>',
            f'<text class="limit" {place} y="{base - 6}">SLO {self.x_text(value)}</text>',
        ]

    def steps(self, values: Sequence[float], kind: str) -> str:
        """Draw which share of the values is how large at most."""
        ordered = sorted(values)
        every = -(-len(ordered) // _MOST_POINTS)
        kept = [(n, value) for n, value in enumerate(ordered, 1) if n % every == 0 or n == len(ordered)]
        line = "".join(f"H{self.x(value)}V{self.y(number / len(ordered))}" for number, value in kept)
        return f'<path class="{kind}" d="M{self.x(ordered[0])},{self.y(0)}{line}H{self.x(self.x.high)}"/>'

    def marks(self, values: Sequence[float], name: str, kind: str) -> list[str]:
        marks = []
        for share, label in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99")):
            value = percentile(values, share)
            title = f"<title>{escape(name)} {label}: {self.x_text(value)}</title>"
            place = f'cx="{self.x(value)}" cy="{self.y(share)}"'
            marks.append(f'<circle class="{kind} mark" {place} r="3.6">{title}</circle>')
        return marks


def cdf(values: Pair, text: Text, label: str, *, limit: float | None = None, names: tuple[str, str]) -> str:
    """Draw which share of requests had at most which value; `limit` is marked."""
    x = positive_scale([*values[0], *values[1]], _LEFT, _WIDTH - _RIGHT)
    frame = Frame(x, Scale(0, 1, _HEIGHT - _BOTTOM, _TOP), text, _percent, label)
    parts = frame.axes() + (frame.limit(limit) if limit is not None else [])
    for name, kind, mine in zip(names, _CLASSES, values, strict=True):
        if mine:
            parts += [frame.steps(mine, kind), *frame.marks(mine, name, kind)]
    return _svg(parts, f"{label}: cumulative distribution")


def scatter(points: tuple[Sequence[Point], Sequence[Point]], text: Text, label: str) -> str:
    """Draw values over time."""
    both = [*points[0], *points[1]]
    x = _time_scale(max((point.x for point in both), default=1.0))
    y = positive_scale([point.y for point in both], _HEIGHT - _BOTTOM, _TOP)
    parts = Frame(x, y, _plain, text, _TIME).axes()
    for kind, mine in zip(_CLASSES, points, strict=True):
        every = -(-len(mine) // _MOST_POINTS) or 1
        parts += [
            f'<circle class="{kind}" cx="{x(p.x)}" cy="{y(p.y)}" r="2.6"><title>{escape(p.label)}</title></circle>'
            for p in mine[::every]
        ]
    return _svg(parts, label)


def rates(points: tuple[Sequence[Point], Sequence[Point]], label: str) -> str:
    """Draw the sums of values per second over time."""
    both = [*points[0], *points[1]]
    end = max((point.x for point in both), default=1.0) or 1.0
    width = end / min(_MOST_BINS, max(4, len(both) // 8))
    binned = [_binned(mine, width) for mine in points]
    x = _time_scale(end)
    y = positive_scale([*binned[0], *binned[1]], _HEIGHT - _BOTTOM, _TOP, from_zero=True)
    parts = Frame(x, y, _plain, _plain, _TIME).axes()
    for kind, mine in zip(_CLASSES, binned, strict=True):
        line = " ".join(f"{x((n + 0.5) * width)},{y(rate)}" for n, rate in enumerate(mine))
        parts.append(f'<polyline class="{kind}" points="{line}"/>')
    return _svg(parts, label)


def shares(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Draw each row as one bar of parts, with a legend of its parts."""
    drawn = []
    for name, parts in rows:
        total = sum(parts.values()) or 1.0
        cells = "".join(
            f'<i class="{_class(part)}" style="flex-grow:{value:g}" title="{escape(part)}: {value:g}"></i>'
            for part, value in parts.items()
            if value
        )
        legend = " ".join(
            f'<span><i class="{_class(part)}"></i>{escape(part)} {value / total * 100:.0f} %</span>'
            for part, value in parts.items()
            if value
        )
        drawn.append(f'<div class="shares"><b>{escape(name)}</b><div class="bar">{cells}</div><p>{legend}</p></div>')
    return "".join(drawn)


def bars(rows: Sequence[tuple[str, float, str]], kind: str = "b") -> str:
    """Draw values as horizontal bars, each with its text."""
    most = max((value for _, value, _ in rows), default=0.0) or 1.0
    drawn = (
        f'<div class="row"><span>{escape(name)}</span><div><i class="{kind}" style="width:{value / most * 100:.2f}%">'
        f"</i></div><span>{escape(text)}</span></div>"
        for name, value, text in rows
    )
    return f'<div class="bars">{"".join(drawn)}</div>'


def _time_scale(end_s: float) -> Scale:
    return Scale(0.0, end_s or 1.0, _LEFT, _WIDTH - _RIGHT)


def _class(part: str) -> str:
    return "part-" + "".join(each if each.isalnum() else "-" for each in part)


def _binned(points: Sequence[Point], width: float) -> list[float]:
    sums = [0.0] * (_MOST_BINS + 1)
    for point in points:
        sums[min(_MOST_BINS, int(point.x / width))] += point.y
    last = max((n for n, each in enumerate(sums) if each), default=-1)
    return [each / width for each in sums[: last + 1]]


def _svg(parts: Sequence[str], title: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _percent(value: float) -> str:
    return f"{value * 100:.0f} %"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"
