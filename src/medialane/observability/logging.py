"""Logging of one process: one line per event on stderr, with the request id if there is one, secrets redacted, and
repetitions limited.

vLLM and uvicorn configure their own loggers; this configures medialane's and the root logger.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from typing import Literal, TextIO

import msgspec
from msgspec import field

#: The id of the current task's request, set where the request is opened.
request_id: ContextVar[str] = ContextVar("medialane_request_id", default="")

_DATA_URL = re.compile(r"(data:[\w.+/-]{0,80}(?:;[\w=.+-]{1,80}){0,4},)[^\s\"')]+")
_USER_INFO = re.compile(r"(\b[a-z][a-z0-9+.-]{1,20}://)[^/\s@\"']+@")
# Signed URLs carry their credentials in the query.
_QUERY = re.compile(r"(\bhttps?://[^\s?\"']+\?)[^\s\"')]+")
_BEARER = re.compile(r"(\b[Bb]earer\s+)\S+")

#: Of a line that is repeated: the first time after which it is written again, doubling up to the second.
_FIRST_INTERVAL_S = 5.0
_MAX_INTERVAL_S = 60.0
_SWEEP_S = 1.0
#: Different lines of one place in the code and one minute. Many processes that become ready are a start, many warnings
#: have one cause.
_MAX_LINES_ELSE = 20
_MAX_LINES = {logging.INFO: 200}


class LoggingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Logging settings."""

    level: Literal["debug", "info", "warning", "error"] = field(default="info", name="log-level")
    """log level of medialane's own messages"""

    def validate(self) -> None:
        """Every value of the type is valid."""


def configure(config: LoggingConfig, stream: TextIO | None = None) -> None:
    """Configure this process's logging, replacing any earlier configuration. Libraries log at WARNING and above."""
    handler = LimitedHandler(stream or sys.stderr)
    handler.setFormatter(PlainFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("medialane").setLevel(config.level.upper())


@contextmanager
def unchanged_levels() -> Iterator[None]:
    """Restore the levels of the root logger and its handlers at the end. A library that vLLM's app imports
    (model_hosting_container_standards) raises them to ERROR, and our own messages would be lost."""
    root = logging.getLogger()
    level, levels = root.level, [(handler, handler.level) for handler in root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        for handler, own in levels:
            handler.setLevel(own)


class _Repetition:
    """A line that was written, and may be repeated."""

    __slots__ = ("interval_s", "next_at", "num_left_out", "record", "since")

    def __init__(self, record: logging.LogRecord, now: float) -> None:
        self.record = record
        self.num_left_out = 0
        self.interval_s = _FIRST_INTERVAL_S
        self.since, self.next_at = now, now + self.interval_s

    def written(self, now: float) -> logging.LogRecord:
        """Return what is written now: the last occurrence, with the number of those that were left out."""
        record, number, seconds = self.record, self.num_left_out, now - self.since
        self.num_left_out = 0
        self.interval_s = min(2 * self.interval_s, _MAX_INTERVAL_S)
        self.since, self.next_at = now, now + self.interval_s
        if not number:
            return record
        counted = copy(record)
        counted.msg, counted.args = f"{record.getMessage()} ({number} more in the last {seconds:.0f} s)", ()
        return counted


class RepetitionLimit:
    """Limits lines that a peer, a client or a loop of retries repeats. Without I/O.

    A line is written at once. Its repetitions are counted, and written with their number after 5 s, then 10, 20, and so
    on up to once a minute: also when something else is logged, so that the end of a problem is preceded by how often it
    occurred. A line that has not occurred for a minute is new again. Of one place in the code and one minute, only so
    many different lines are written (`_MAX_LINES`): the others count as repetitions of each other.
    """

    def __init__(self) -> None:
        self._lines: dict[tuple[object, ...], _Repetition] = {}
        self._num_of_place: Counter[tuple[str, int]] = Counter()
        self._next_sweep = -math.inf

    def admit(self, record: logging.LogRecord, now: float) -> list[logging.LogRecord]:
        """Return the records to write: those that are due, and `record` unless it is a repetition."""
        if record.levelno < logging.INFO:
            return [record]
        due = self._due(now)
        place = (record.pathname, record.lineno)
        key: tuple[object, ...] = (*place, record.getMessage(), repr(record.exc_info[1]) if record.exc_info else "")
        if key not in self._lines and self._num_of_place[place] >= _MAX_LINES.get(record.levelno, _MAX_LINES_ELSE):
            key = place
        line = self._lines.get(key)
        if line is None:
            self._lines[key] = _Repetition(record, now)
            self._num_of_place[place] += 1
            return [*due, record]
        line.record = record
        if now < line.next_at:
            line.num_left_out += 1
            return due
        return [*due, line.written(now)]

    def _due(self, now: float) -> list[logging.LogRecord]:
        """Return a record for each line that was repeated and is due; forget lines that do not occur any more."""
        if now < self._next_sweep:
            return []
        self._next_sweep = now + _SWEEP_S
        due = []
        for key, line in list(self._lines.items()):
            if now >= line.next_at and line.num_left_out:
                due.append(line.written(now))
            elif now >= line.next_at + _MAX_INTERVAL_S:
                del self._lines[key]
                self._num_of_place[line.record.pathname, line.record.lineno] -= 1
        return due


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes lines within a RepetitionLimit."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._limit = RepetitionLimit()
        self._clock = clock

    def emit(self, record: logging.LogRecord) -> None:
        try:
            admitted = self._limit.admit(record, self._clock())
        except Exception:  # noqa: BLE001 - as in `logging`: arguments that do not fit the message raise anything
            self.handleError(record)
            return
        for each in admitted:
            token = request_id.set(request_id.get() if each is record else "")
            super().emit(each)
            request_id.reset(token)


class PlainFormatter(logging.Formatter):
    """`2026-01-31 12:00:00 INFO gateway.workers [chatcmpl-1]: message`, redacted after formatting."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(request)s: %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        current = request_id.get()
        record.request = f" [{current}]" if current else ""
        return redact(super().format(record))


def redact(text: str) -> str:
    """Remove payloads of data URLs, credentials and queries of URLs, and bearer tokens."""
    text = _DATA_URL.sub(r"\1...", text)
    text = _USER_INFO.sub(r"\1***@", text)
    text = _QUERY.sub(r"\1***", text)
    return _BEARER.sub(r"\1***", text)
