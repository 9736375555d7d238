"""Logging of one process: one line per event on stderr, with the request's ids if there is one, secrets redacted, and
repetitions limited, as text or JSON.

Theory of operation. All lines go through one handler, the root logger's, also the lines of vLLM and uvicorn, which are
kept from installing theirs (`config.environment`, `vllm_bridge.frontend.http_server`). What is made here is passed to
processes that this one executes, vLLM's among them, in one variable (`VARIABLE`, `configure_child`).

As JSON, what Python code writes to stdout and stderr (`print`, progress bars, warnings, tracebacks) becomes lines of
their own; only libraries in C, and the last words of a process that crashes, write around it.
"""

from __future__ import annotations

import io
import logging
import math
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Literal, TextIO

import msgspec
from msgspec import field

#: The id of the current task's request, and of its trace if it has one, set where the request is opened.
request_id: ContextVar[str] = ContextVar("medialane_request_id", default="")
trace_id: ContextVar[str] = ContextVar("medialane_trace_id", default="")

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-|$)")

#: Names the logging of a process in the environment of programs that it executes.
VARIABLE: Final = "MEDIALANE_LOG_PROCESS"

#: The logger of the lines of requests (`--access-log`). Each is written, however many there are.
ACCESS_LOGGER: Final = "medialane.access"

#: Prefix of the error line of our own commands when they cannot start.
REPORTED_ERROR: Final = "medialane: error: "

#: What is not limited: lines of requests, and lines that were written as text, where equal lines have a meaning.
_UNLIMITED: Final = frozenset({ACCESS_LOGGER, "uvicorn.access", "stdout", "stderr"})

#: Of one line as JSON, so that it can be read again whole.
_MAX_CHARACTERS: Final = 8000
_MAX_PENDING_CHARACTERS: Final = 8000
#: Of a message with its traceback as text.
_MAX_PLAIN_CHARACTERS: Final = 32_000

_START_OF_JSON: Final = '{"ts":"'
#: The names of loggers are at these places of lines only.
_ACCESS_LINE: Final = re.compile(
    rf'^(?:\{{"ts":"[^"]*","level":"[A-Z]+","logger":"|[\d-]+ [\d:]+ [A-Z]+ ){re.escape(ACCESS_LOGGER)}[ ":]'
)

_DATA_URL = re.compile(r"(data:[\w.+/-]{0,80}(?:;[\w=.+-]{1,80}){0,4},)[^\s\"')]+")
_USER_INFO = re.compile(r"(\b[a-z][a-z0-9+.-]{1,20}://)[^/\s@\"']+@")
# Signed URLs carry their credentials in the query.
_QUERY = re.compile(r"(\bhttps?://[^\s?\"']++)(\?[^\s\"')]+)?")
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
    format: Literal["text", "json"] = field(default="text", name="log-format")
    """format of all logs; json: one object per line"""
    access: bool = field(default=False, name="access-log")
    """log a line for each request when it ends (model, tenant, media, worker, times, tokens, status, reason), instead
    of the HTTP server's"""

    def validate(self) -> None:
        """Every value of the type is valid."""


class LogProcess(msgspec.Struct, frozen=True):
    """How a process logs, and as which part of the server."""

    component: str
    config: LoggingConfig

    def environ(self) -> dict[str, str]:
        """Return the variable of processes that are to log likewise."""
        return {VARIABLE: msgspec.json.encode(self).decode()}


def trace_of(traceparent: str) -> str:
    """Return the trace id of a W3C trace context; empty if it has none."""
    found = _TRACEPARENT.match(traceparent)
    return "" if found is None or not found[1].strip("0") else found[1]


def configure(config: LoggingConfig, stream: TextIO | None = None, *, component: str = "medialane") -> LogProcess:
    """Configure this process's logging, replacing any earlier configuration. Libraries log at WARNING and above."""
    handler = LimitedHandler(stream or _raw(sys.stderr))
    handler.setFormatter(PlainFormatter() if config.format == "text" else JsonFormatter(component))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    set_level(config)
    logging.getLogger(ACCESS_LOGGER).setLevel(logging.INFO)  # it has a setting of its own
    if config.format == "json":
        sys.stdout = _Lines(_raw(sys.stdout), logging.getLogger("stdout"))
        sys.stderr = _Lines(_raw(sys.stderr), logging.getLogger("stderr"))
        sys.excepthook = _log_uncaught
        logging.captureWarnings(True)
    return LogProcess(component, config)


def set_level(config: LoggingConfig) -> None:
    """Change the level of this process's logging."""
    logging.getLogger("medialane").setLevel(config.level.upper())


def configure_child(component: str = "") -> None:
    """Configure a process that was executed by one of ours, or by vLLM in one of ours, like that. `component` is added
    to the name of the part of the server."""
    try:
        given = msgspec.json.decode(os.environ.get(VARIABLE, ""), type=LogProcess)
    except msgspec.DecodeError:
        given = LogProcess("", LoggingConfig())
    configure(given.config, component="/".join(filter(None, (given.component, component))))


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
        text = _TRACEBACKS.formatException(record.exc_info) if record.exc_info else record.exc_text
        self.record = _kept(record, text)
        self.num_left_out = 0
        self.interval_s = _FIRST_INTERVAL_S
        self.since, self.next_at = now, now + self.interval_s

    def written(self, now: float) -> logging.LogRecord:
        """Return what is written now: the last occurrence, with the number of omitted ones."""
        record, number, seconds = self.record, self.num_left_out, now - self.since
        self.num_left_out = 0
        self.interval_s = min(2 * self.interval_s, _MAX_INTERVAL_S)
        self.since, self.next_at = now, now + self.interval_s
        if not number:
            return record
        counted = copy(record)
        counted.msg, counted.args = f"{record.getMessage()} ({number} more in the last {seconds:.0f} s)", ()
        return counted


_TRACEBACKS = logging.Formatter()


def _kept(record: logging.LogRecord, exc_text: str | None) -> logging.LogRecord:
    """Return the record without references to what is logged: the frames of a traceback have all of their variables,
    in a preparer the item that it has decoded."""
    kept = copy(record)
    kept.msg, kept.args, kept.exc_info, kept.exc_text = _bounded(record.getMessage()), (), None, exc_text
    return kept


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
        """Return the records to write: due ones, and `record` unless it is a repetition."""
        if record.levelno < logging.INFO or record.name in _UNLIMITED:
            return [record]
        due = self._due(now)
        place = (record.pathname, record.lineno)
        key: tuple[object, ...] = (
            *place,
            _bounded(record.getMessage()),
            _bounded(repr(record.exc_info[1])) if record.exc_info else "",
        )
        if key not in self._lines and self._num_of_place[place] >= _MAX_LINES.get(record.levelno, _MAX_LINES_ELSE):
            key = place
        line = self._lines.get(key)
        if line is None:
            self._lines[key] = _Repetition(record, now)
            self._num_of_place[place] += 1
            return [*due, record]
        line.record = _kept(record, line.record.exc_text)
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
    """`2026-01-31 12:00:00 INFO gateway.workers [chatcmpl-1]: message`, redacted after formatting. Processes that vLLM
    has started are named before the request."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(origin)s: %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        process, current = _process(record), request_id.get()
        record.origin = f"{process and f' ({process})'}{current and f' [{current}]'}"
        return redact(_bounded(super().format(record), _MAX_PLAIN_CHARACTERS))


class JsonFormatter(logging.Formatter):
    """An object in one line. Members that do not apply are omitted; `fields` of the record are added to it, or replace
    others."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = record.__dict__.get("fields", {})
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "msg": fields.get("msg") or redact(_bounded(record.getMessage())),
            "component": self._component,
        }
        given = {"process": _process(record), "request_id": request_id.get(), "trace_id": trace_id.get()}
        line |= {name: value for name, value in given.items() if value}
        line |= fields
        if record.exc_info:
            line["exception"] = redact(_bounded(self.formatException(record.exc_info)))
        elif record.exc_text:
            line["exception"] = redact(_bounded(record.exc_text))
        if record.stack_info:
            line["stack"] = redact(_bounded(record.stack_info))
        return msgspec.json.encode(line).decode()


class _Written(msgspec.Struct):
    """A line of a JsonFormatter."""

    ts: str
    level: str
    logger: str
    msg: str
    exception: str = ""


def is_json(line: str) -> bool:
    """Return whether a line is one of a JsonFormatter."""
    return line.startswith(_START_OF_JSON)


def is_access_line(line: str) -> bool:
    """Return whether a line of either format is about a request."""
    return _ACCESS_LINE.search(line) is not None


def write_line(line: str) -> None:
    """Write a line of another process's log as it is."""
    print(line, file=_raw(sys.stderr), flush=True)


def as_text(line: str) -> list[str]:
    """Return the lines of text that a line of a log says, if it is JSON; else itself."""
    if not is_json(line):
        return [line]
    try:
        written = msgspec.json.decode(line, type=_Written)
    except msgspec.DecodeError:  # cut, in a file that was truncated
        return [line]
    if written.logger in ("stdout", "stderr"):
        return written.msg.splitlines()
    text = f"{written.ts} {written.level} {written.logger}: {written.msg}"
    return [*text.splitlines(), *written.exception.splitlines()]


class _Lines(io.TextIOBase):
    """Writes the lines of a text stream as records of a log. `raw` is the stream that this one replaces."""

    def __init__(self, raw: TextIO, logger: logging.Logger) -> None:
        self.raw = raw
        self._logger = logger
        self._pending = ""
        self._lock = threading.Lock()
        logger.setLevel(logging.INFO)

    def write(self, text: str) -> int:
        if text.startswith(REPORTED_ERROR):  # of several lines, which belong together
            self._logger.error("%s", text.rstrip())
            return len(text)
        with self._lock:
            *lines, self._pending = (self._pending + text).split("\n")
            if len(self._pending) > _MAX_PENDING_CHARACTERS:
                lines, self._pending = [*lines, self._pending], ""
        for line in lines:
            shown = line.rstrip().rpartition("\r")[2]  # progress bars rewrite their line
            if shown:
                self._logger.info("%s", shown)
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.raw.fileno()

    def flush(self) -> None:
        """Lines are written when they are complete."""


def _raw(stream: TextIO) -> TextIO:
    return stream.raw if isinstance(stream, _Lines) else stream


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("medialane").critical("this process ends", exc_info=(kind, error, trace))


def _process(record: logging.LogRecord) -> str:
    """Return the name of the process among Python's multiprocessing children; empty for their parent."""
    return "" if record.processName in (None, "MainProcess") else str(record.processName)


def _bounded(text: str, most: int = _MAX_CHARACTERS) -> str:
    """Return the beginning and the end of a long text, without the words that are cut: of a URL, the part that is left
    could not be recognized as one."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2].rpartition(' ')[0]} ... {text[-(most // 2) :].partition(' ')[2]}"


def redact(text: str) -> str:
    """Remove payloads of data URLs, credentials and queries of URLs, and bearer tokens."""
    text = _DATA_URL.sub(r"\1...", text)
    text = _USER_INFO.sub(r"\1***@", text)
    text = _QUERY.sub(lambda url: f"{url[1]}?***" if url[2] else url[1], text)
    return _BEARER.sub(r"\1***", text)
