"""What a format says of a line (or a row) of its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medialane.compare.stand_ins import StandIns
from medialane.compare.traffic import Ask, UnusableLine

#: A line as JSON, or a row of a CSV file by its header.
Line = Mapping[str, Any]


@dataclass(frozen=True)
class Sources:
    """Where the media of a line are: paths are relative to the folder of its file; others are made."""

    folder: Path
    stand_ins: StandIns


@dataclass(frozen=True)
class LineFormat:
    """`matches` tells by the first line of a file. `ask` makes a line's request, `seconds` is its
    time, `id_of` its name. `note` says what of requests is made up."""

    name: str
    matches: Callable[[Line], bool]
    ask: Callable[[Line, Sources], Ask]
    seconds: Callable[[Line], float | None] = lambda _: None
    id_of: Callable[[Line], str] = lambda _: ""
    note: str = ""


def number_in(line: Line, *names: str) -> float:
    """Return the first of these members that the line has. Raises UnusableLine."""
    for name in names:
        if line.get(name) not in (None, ""):
            try:
                return float(line[name])
            except (TypeError, ValueError):
                raise UnusableLine(f"{name} is {str(line[name])[:40]!r}, not a number") from None
    raise UnusableLine(f"it has no {' or '.join(names)}")


def count_in(line: Line, *names: str, most: int = 1 << 20) -> int:
    """As `number_in`, a count of tokens. Raises UnusableLine."""
    count = int(number_in(line, *names))
    if not 0 <= count <= most:
        raise UnusableLine(f"{names[0]} is {count}, not between 0 and {most}")
    return count


def text_in(line: Line, name: str) -> str:
    """Return a string. Raises UnusableLine."""
    value = line.get(name)
    if not isinstance(value, str):
        raise UnusableLine(f"{name} is not a string")
    return value
