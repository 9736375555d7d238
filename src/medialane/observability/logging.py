"""Logging of one process: one line per event on stderr, with the request id if there is one, secrets redacted.

vLLM and uvicorn configure their own loggers; this configures medialane's and the root logger.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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


class LoggingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Logging settings."""

    level: Literal["debug", "info", "warning", "error"] = field(default="info", name="log-level")
    """log level of medialane's own messages"""

    def validate(self) -> None:
        """Every value of the type is valid."""


def configure(config: LoggingConfig, stream: TextIO | None = None) -> None:
    """Configure this process's logging, replacing any earlier configuration. Libraries log at WARNING and above."""
    handler = logging.StreamHandler(stream or sys.stderr)
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


class RateLimitedWarning:
    """A warning that clients can trigger at any rate: logged at most once in `every_s` seconds."""

    def __init__(
        self, logger: logging.Logger, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._every_s = every_s
        self._clock = clock
        self._next = -math.inf
        self._num_left_out = 0

    def __call__(self, message: str, *args: object) -> None:
        if (now := self._clock()) < self._next:
            self._num_left_out += 1
            return
        if self._num_left_out:
            message = f"{message} ({self._num_left_out} more times since this was last logged)"
        self._next, self._num_left_out = now + self._every_s, 0
        self._logger.warning(message, *args)


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
