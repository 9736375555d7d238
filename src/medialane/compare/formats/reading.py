"""Reads a file of traffic, whatever its format.

JSONL is read twice: once for times and ids, and again, line by line, when requests are made. CSV files and JSON lists,
whose requests are small, stay in memory.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from blake3 import blake3

from medialane.compare.formats.datasets import DATASETS
from medialane.compare.formats.line_format import Line, LineFormat, Sources
from medialane.compare.formats.requests import BATCH, BODIES, RECORDED
from medialane.compare.formats.traces import TRACES
from medialane.compare.stand_ins import StandIns
from medialane.compare.traffic import Ask, Traffic, TrafficRequest, UnusableLine
from medialane.core.errors import StartupFailed

#: The first that matches a file's first line counts.
FORMATS: Final[Sequence[LineFormat]] = (RECORDED, BATCH, BODIES, *TRACES, *DATASETS)

_MOST_BAD_LINES: Final = 10


class _Row(NamedTuple):
    """A line: where it is in the file, for messages, what it says, and how to read it again."""

    place: str
    line: Line
    again: Callable[[], Line]


def read_traffic(path: Path, *, media: Path, limit: int | None = None) -> Traffic:
    """Read the first `limit` requests, sorted by their times. Media that are made up are kept in the folder `media`.
    Raises StartupFailed if it is no such file."""
    try:
        rows, bad = _rows(path, limit)
        digest = _digest(path)
    except OSError as error:
        raise StartupFailed(f"--requests {path}: {error.strerror}") from error
    if not rows:
        raise StartupFailed(f"--requests {path}: there is no request in it{f' ({bad[0]})' if bad else ''}")
    chosen = next((each for each in FORMATS if each.matches(rows[0].line)), None)
    if chosen is None:
        known = ", ".join(each.name for each in FORMATS)
        names = ", ".join(list(rows[0].line)[:8])
        raise StartupFailed(f"--requests {path}: {rows[0].place} has {names}: none of the known formats ({known})")
    notes = [note for note in (chosen.note, *bad) if note]
    sources = Sources(path.parent, StandIns(media))
    return Traffic(chosen.name, _requests(path, rows, chosen, sources), digest, tuple(notes))


def _requests(path: Path, rows: Sequence[_Row], chosen: LineFormat, sources: Sources) -> tuple[TrafficRequest, ...]:
    try:
        times = [chosen.seconds(row.line) for row in rows]
    except UnusableLine as error:
        raise StartupFailed(f"--requests {path}: {error}") from error
    known = [time for time in times if time is not None]
    first = min(known, default=0.0)
    timed = len(known) == len(rows)
    order = sorted(range(len(rows)), key=lambda n: times[n] or 0.0) if timed else range(len(rows))
    return tuple(
        TrafficRequest(
            chosen.id_of(rows[n].line) or str(n + 1),
            (times[n] or 0.0) - first if timed else None,
            partial(_ask, f"{path.name}, {rows[n].place}", rows[n].again, chosen, sources),
        )
        for n in order
    )


def _ask(place: str, again: Callable[[], Line], chosen: LineFormat, sources: Sources) -> Ask:
    try:
        return chosen.ask(again(), sources)
    except (UnusableLine, OSError) as error:
        raise UnusableLine(f"{place}: {error}") from error


def _rows(path: Path, limit: int | None) -> tuple[list[_Row], list[str]]:
    """Return the rows, and what is wrong with others."""
    if path.suffix.lower() == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = list(islice(csv.DictReader(file), limit))
        return [_in_memory(f"row {n}", line) for n, line in enumerate(lines, 1)], []
    with path.open("rb") as file:
        is_list = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    return (_list_rows if is_list else _line_rows)(path, limit)


def _list_rows(path: Path, limit: int | None) -> tuple[list[_Row], list[str]]:
    try:
        documents = json.loads(path.read_bytes())
    except ValueError as error:
        raise StartupFailed(f"--requests {path} is not JSON: {error}") from error
    objects = [each for each in documents if isinstance(each, dict)]
    return [_in_memory(f"entry {n}", line) for n, line in enumerate(objects[:limit], 1)], []


def _in_memory(place: str, line: Line) -> _Row:
    return _Row(place, line, lambda: line)


def _line_rows(path: Path, limit: int | None) -> tuple[list[_Row], list[str]]:
    rows, bad = list[_Row](), list[str]()
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            place, start = f"line {number}", offset
            offset += len(raw)
            if not raw.strip():
                continue
            if limit is not None and len(rows) == limit:
                break
            try:
                rows.append(_Row(place, _head(raw), partial(_read_line, path, start, len(raw))))
            except ValueError as error:  # a recording may end within a line
                bad.append(f"{place} is left out: {error}")
    if len(bad) > _MOST_BAD_LINES and len(bad) > len(rows):
        raise StartupFailed(f"--requests {path} is not JSONL: {bad[0]}")
    return rows, bad[:_MOST_BAD_LINES]


def _head(raw: bytes) -> Line:
    """Return a line without the body that it may have: it is large, and read again later. Raises ValueError."""
    try:
        line = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return {name: None if name == "body" else msgspec.json.decode(value) for name, value in line.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no JSON object: {error}") from error


def _read_line(path: Path, start: int, size: int) -> Line:
    try:
        with path.open("rb") as file:
            file.seek(start)
            document = msgspec.json.decode(file.read(size))
    except (OSError, msgspec.DecodeError) as error:
        raise UnusableLine(f"it has changed since the start: {error}") from error
    return document if isinstance(document, dict) else {}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        hasher = blake3()
        while piece := file.read(1 << 20):
            hasher.update(piece)
        return hasher.hexdigest(length=16)
