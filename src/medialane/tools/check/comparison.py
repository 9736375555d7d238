"""Compares two answers: values that differ, and the largest difference of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Members that differ between servers for equal outputs: names, dates, cache hits.
VOLATILE = frozenset(
    (
        "id",
        "created",
        "created_at",
        "completed_at",
        "system_fingerprint",
        "prompt_tokens_details",
        "input_tokens_details",
        "request_id",
    )
)
_MAX_SHOWN = 60


@dataclass(frozen=True)
class Difference:
    """`largest` is the largest difference of two fractional numbers at the same place. `first` describes the first
    other difference; empty if there is none."""

    largest: float = 0.0
    first: str = ""


def compare(ours: Any, plain: Any) -> Difference:
    """Compare two JSON values except for volatile members."""
    largest, first = 0.0, ""
    for difference in _differences(ours, plain, ""):
        if isinstance(difference, str):
            first = first or difference.removeprefix(".")
        else:
            largest = max(largest, difference)
    return Difference(largest, first)


def _differences(ours: Any, plain: Any, at: str) -> Iterator[str | float]:
    if isinstance(ours, dict) and isinstance(plain, dict):
        yield from _of_objects(ours, plain, at)
    elif isinstance(ours, list) and isinstance(plain, list):
        for number, (one, other) in enumerate(zip(ours, plain, strict=False)):
            yield from _differences(one, other, f"{at}[{number}]")
        if len(ours) != len(plain):
            yield f"{at}: {len(ours)} values instead of {len(plain)}"
    elif _is_number(ours) and _is_number(plain) and (isinstance(ours, float) or isinstance(plain, float)):
        if not (math.isnan(ours) and math.isnan(plain)) and ours != plain:
            distance = abs(ours - plain)
            yield math.inf if math.isnan(distance) else float(distance)
    elif ours != plain or type(ours) is not type(plain):
        yield f"{at}: {_short(ours)} instead of {_short(plain)}"


def _of_objects(ours: dict[str, Any], plain: dict[str, Any], at: str) -> Iterator[str | float]:
    for name in [*plain, *(name for name in ours if name not in plain)]:
        if name in VOLATILE:
            continue
        place = f"{at}.{name}"
        if name not in ours:
            yield f"{place} is missing"
        elif name not in plain:
            yield f"{place} is not in plain vLLM's answer"
        else:
            yield from _differences(ours[name], plain[name], place)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
