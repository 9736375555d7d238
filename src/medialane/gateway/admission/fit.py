"""Learns how long work takes from measured times: robust against outliers, and quick to follow a change."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import Final

import numpy as np
from numpy.typing import NDArray

#: Weight that a sample keeps when the next one comes: it halves in about 70.
_KEPT: Final = 0.99
#: Samples before a fit may be certain.
ENOUGH: Final = 20
#: A sample agrees with what was expected if it differs by at most this share of itself, or this many ms: noise.
_TOLERANCE: Final = 0.3
_NOISE_MS: Final = 5.0
#: A fit is certain once this share of the last samples agreed with what it expected. Weight of the newest sample in it.
_CERTAIN: Final = 0.7
_NEWEST: Final = 0.05
#: Once there are enough samples, one counts as at most so many times as long, or short, as was expected.
_MOST: Final = 4.0
#: Of the scale that all kinds of work have in common, the least that one kind takes.
_FLOOR: Final = 0.05
#: Samples that the common scale weighs as much as.
_PRIOR: Final = 0.5
#: Once there are enough samples, the rates are computed after so many new ones.
_STRIDE: Final = 4


class Agreement:
    """Whether enough of the last times were as expected, once. If they no longer are, under overload, that is no time
    to admit everything: what has changed is learned."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.is_certain = False
        self._share = 0.0

    def compare(self, expected_ms: float, measured_ms: float) -> None:
        self.num_samples += 1
        agrees = abs(measured_ms - expected_ms) <= _TOLERANCE * measured_ms + _NOISE_MS
        self._share += _NEWEST * (agrees - self._share)
        share = self._share / (1 - (1 - _NEWEST) ** self.num_samples)
        self.is_certain |= self.num_samples >= ENOUGH and share >= _CERTAIN


class RateFit:
    """By how much each kind of work takes longer than assumed: `rates`, ms per assumed ms.

    A weighted least-squares fit in which old samples fade, and errors count relative to the expected time. Kinds of
    work of which the samples say nothing are taken to be as much slower than assumed as the rest is: so a single sample
    sets the scale, and the others the differences.
    """

    def __init__(self, num_kinds: int) -> None:
        self.rates: tuple[float, ...] = (1.0,) * num_kinds
        self.scale = 1.0
        self.num_samples = 0
        self._squares: NDArray[np.float64] = np.zeros((num_kinds, num_kinds))
        self._products: NDArray[np.float64] = np.zeros(num_kinds)
        self._assumed = self._measured = 0.0

    def expected_ms(self, work: Sequence[float]) -> float:
        """Return the expected time of work that is assumed to take these ms, by kind."""
        return sum(map(mul, self.rates, work), 0.0)

    def learn(self, work: Sequence[float], measured_ms: float) -> None:
        """Learn from one measured time."""
        expected = self.expected_ms(work)
        self.num_samples += 1
        if self.num_samples > ENOUGH:
            measured_ms = clipped(measured_ms, expected)
        amounts = np.array(work)
        weight = 1.0 / max(expected, 1.0) ** 2
        self._squares = self._squares * _KEPT + weight * np.multiply.outer(amounts, amounts)
        self._products = self._products * _KEPT + weight * measured_ms * amounts
        self._assumed = self._assumed * _KEPT + weight * expected * float(amounts.sum())
        self._measured = self._measured * _KEPT + weight * expected * measured_ms
        if self._assumed and (self.num_samples <= ENOUGH or self.num_samples % _STRIDE == 0):
            self._solve()

    def _solve(self) -> None:
        self.scale = scale = self._measured / self._assumed
        # A share of what a sample contributes; the rest keeps kinds that have not occurred at the common scale.
        prior = _PRIOR * (1 - _KEPT) * self._squares.diagonal() + 1e-12
        squares = self._squares + np.diag(prior)
        products = self._products + prior * scale
        rates = np.linalg.solve(squares, products)
        floor = _FLOOR * scale
        low = rates < floor
        if low.any():  # the others make up for what is at the floor
            high = ~low
            rates[low] = floor
            if high.any():
                rest = products[high] - squares[np.ix_(high, low)] @ rates[low]
                rates[high] = np.maximum(np.linalg.solve(squares[np.ix_(high, high)], rest), floor)
        self.rates = tuple(rates.tolist())


class Ratio:
    """The ratio of measured to assumed ms, of sums in which old samples fade."""

    def __init__(self) -> None:
        self._measured = self._assumed = 0.0

    def value(self, prior: float, prior_ms: float) -> float:
        """Return the ratio; `prior` counts as a sample of `prior_ms` assumed ms."""
        return (self._measured + prior * prior_ms) / (self._assumed + prior_ms)

    def learn(self, measured_ms: float, assumed_ms: float) -> None:
        self._measured = self._measured * _KEPT + measured_ms
        self._assumed = self._assumed * _KEPT + assumed_ms


def clipped(measured_ms: float, expected_ms: float) -> float:
    """Return a measured time, within a factor of what was expected."""
    return min(max(measured_ms, expected_ms / _MOST), expected_ms * _MOST)
