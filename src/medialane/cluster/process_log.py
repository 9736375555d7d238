"""The output of one part: a file that the part writes to directly, read here for its operator.

The part holds the file's descriptor itself, so that it never waits for this process, not even for a stopped one. The
file is bounded by cutting: the newer half is kept in `<name>.old`, and the file starts anew. What the part writes while
it is cut may be lost; that is the price of not standing between a part and its log.
"""

from __future__ import annotations

import os
import re
from collections import deque
from pathlib import Path

_MAX_READ_BYTES = 1 << 18
_NUM_TAIL_LINES = 200
_MAX_LINE_CHARACTERS = 2000
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: What our own commands print when they cannot start.
REPORTED_ERROR = "medialane: error: "
_EXCEPTION = re.compile(r"\b((?:\w+\.)*\w*(?:Error|Exception|Exit)): (\S.*)")
#: vLLM's front end tells that its engine failed after the engine has told why.
_SECONDARY_ERRORS = re.compile(r"Engine core initialization failed|EngineDeadError|died unexpectedly|resource_tracker")


class ProcessLog:
    """Lines of one log file as they come. Lines are cut at 2000 characters and have no colours."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._offset = 0
        self._rest = b""
        self._tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)

    def open(self) -> int:
        """A descriptor for a part to write to; the caller closes its own copy. One life's lines follow another's."""
        self._tail.clear()
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def read(self) -> list[str]:
        """The complete lines since the last call, a quarter of a MiB of them at most."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_MAX_READ_BYTES)
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-_MAX_LINE_CHARACTERS:]
        found = [_clean(line) for line in lines]
        self._tail.extend(line for line in found if line)
        if self._offset > self._max_bytes and len(data) < _MAX_READ_BYTES:
            self._cut()
        return found

    def tail(self, num_lines: int) -> list[str]:
        """The last lines that were read and are not empty."""
        return list(self._tail)[-num_lines:]

    @property
    def last_line(self) -> str:
        return self._tail[-1] if self._tail else ""

    def reported_error(self) -> str | None:
        """What one of our own commands gave as the reason for its end."""
        found = [line.partition(REPORTED_ERROR)[2] for line in self._tail if line.startswith(REPORTED_ERROR)]
        return found[-1] if found else None

    def first_exception(self) -> str | None:
        """The first exception that is not merely the consequence of another one."""
        found = (_EXCEPTION.search(line) for line in self._tail if not _SECONDARY_ERRORS.search(line))
        return next((f"{m[1]}: {m[2]}" for m in found if m), None)

    def _cut(self) -> None:
        keep = min(self._max_bytes // 2, self._offset)
        with self.path.open("rb") as file:
            file.seek(self._offset - keep)
            self.path.with_suffix(".old").write_bytes(file.read(keep))
        os.truncate(self.path, 0)  # O_APPEND: the part goes on at the new end
        self._offset = 0


def _clean(line: bytes) -> str:
    text = line.rsplit(b"\r", 1)[-1] if b"\r" in line.rstrip(b"\r") else line  # progress bars rewrite their line
    return _ANSI.sub("", text.decode(errors="replace")).rstrip()[:_MAX_LINE_CHARACTERS]
