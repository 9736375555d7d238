"""Axes: from values to places, and the round values at which they are labelled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: If the largest value is so many times the smallest, the axis is logarithmic.
_LOG_RANGE = 30.0
_STEPS = (1, 2, 2.5, 5, 10)
#: Part of the range that is left free at its ends.
_MARGIN = 0.08


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [start, end]."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, most: int = 6) -> list[float]:
        return _log_ticks(self.low, self.high, most) if self.is_log else _linear_ticks(self.low, self.high, most)


def positive_scale(values: Iterable[float], start: float, end: float, *, from_zero: bool = False) -> Scale:
    """Return a scale for values that are not negative: logarithmic for a wide range, unless it begins with 0."""
    known = sorted(value for value in values if value > 0)
    if not known:
        return Scale(0.0, 1.0, start, end)
    low, high = known[0], known[-1]
    if from_zero:
        return Scale(0.0, _round_up(high), start, end)
    if high / low >= _LOG_RANGE:
        return Scale(low * 0.9, high * 1.1, start, end, is_log=True)
    margin = (high - low) * _MARGIN or high * _MARGIN
    return Scale(max(0.0, low - margin), high + margin, start, end)


def _round_up(value: float) -> float:
    step = _step(value / 5)
    return step * math.ceil(round(value / step, 9))


def _step(least: float) -> float:
    power: float = 10 ** math.floor(math.log10(least))
    return next(power * each for each in _STEPS if power * each >= least * 0.999)


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    step = _step((high - low) / (most - 1))
    first, last = math.ceil(round(low / step, 9)), math.floor(round(high / step, 9))
    return [step * number for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= most:
            return inside
    return _thinned(inside, most)


def _thinned(ticks: Sequence[float], most: int) -> list[float]:
    every = -(-len(ticks) // most)
    return list(ticks[::every])
