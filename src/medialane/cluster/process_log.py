"""The logs of one run: their folder, and the output of each process, which is read here for the operator.

A process writes to its file directly. It holds the descriptor itself, so it never blocks on the supervisor, not even on
a stopped one. The size of the file is bounded by rotation: the newer half is kept in `<name>.old`, and the file is
truncated. Output written during a rotation may be lost; that is the price of not piping the log through the supervisor.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import deque
from pathlib import Path

from medialane.observability.logging import REPORTED_ERROR, as_text, is_json
from medialane.runtime.private_files import OwnedFolder, try_lock, write_private
from medialane.runtime.resources import LACK_OF_MEMORY
from medialane.types.errors import StartupFailed

_MAX_READ_BYTES = 1 << 18
_NUM_TAIL_LINES = 200
_MAX_LINE_CHARACTERS = 2000
#: As JSON, in which a line is one object with a message and a traceback, each of at most 8000 characters.
_MAX_JSON_CHARACTERS = 1 << 16
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_EXCEPTION = re.compile(r"(?<![\w.])([\w.]*(?:Error|Exception|Exit)): (\S.*)")
#: vLLM's front end reports that its engine failed, after the engine has logged the cause.
_SECONDARY_ERRORS = re.compile(r"Engine core initialization failed|EngineDeadError|died unexpectedly|resource_tracker")
#: Folders of failed runs that are kept; older ones are removed when the next run starts.
NUM_KEPT = 5
_PREFIX = "medialane-logs-"
_LOCK = ".lock"
_SHOWN_LINES = 15


class LogFolder:
    """The folder of the logs: a private one, which only failed runs leave behind, or one that the operator has chosen:
    its files are appended to and never removed."""

    def __init__(self, path: Path, owned: OwnedFolder | None = None, lock: int | None = None) -> None:
        self.path = path
        #: Whether `close` leaves the logs there: of a chosen folder always, of a private one if the run fails.
        self.keep = True
        self._owned = owned
        self._lock = lock

    @classmethod
    def create(cls, chosen: str, prefix: str = _PREFIX, *, shared: bool = False) -> LogFolder:
        """Use the folder `chosen`, without others unless it is `shared`; if empty, create a private one. Raises
        StartupFailed."""
        if not chosen:
            owned = OwnedFolder.create(Path(tempfile.gettempdir()), prefix, num_kept=NUM_KEPT)
            return cls(owned.path, owned)
        path = Path(chosen).expanduser().absolute()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = None if shared else os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupFailed(f"--log-dir {chosen}: {error.strerror}") from error
        if lock is not None and not try_lock(lock):
            os.close(lock)
            raise StartupFailed(f"--log-dir {chosen} is in use by another `medialane serve`: choose another folder")
        return cls(path, lock=lock)

    def close(self) -> None:
        """Remove a private folder whose logs are not to be kept. Idempotent."""
        if self._owned is not None:
            self._owned.close(keep=self.keep)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class ProcessLog:
    """Reads a log file incrementally. Lines of text are cut at 2000 characters and stripped of ANSI codes."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._offset = path.stat().st_size if path.exists() else 0  # the rest is of earlier runs
        self._rest = b""
        self._tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)

    def open(self) -> int:
        """Return a descriptor for the process to write to, appending; the caller closes its own copy."""
        self._tail.clear()
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def read(self) -> list[str]:
        """Return the complete lines since the last call, from at most a quarter of a MiB."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_MAX_READ_BYTES)
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-_MAX_JSON_CHARACTERS:]
        cleaned = [_clean(line) for line in lines]
        self._tail.extend(text for line in cleaned if line for text in as_text(line))
        if self._offset > self._max_bytes and len(data) < _MAX_READ_BYTES:
            self._cut()
        return cleaned

    def tail(self, num_lines: int) -> list[str]:
        """Return the last non-empty lines that were read, as text."""
        return list(self._tail)[-num_lines:]

    def reported_error(self) -> str | None:
        """Return the error that one of our own commands reported on exit."""
        errors = [line.partition(REPORTED_ERROR)[2] for line in self._tail if line.startswith(REPORTED_ERROR)]
        return errors[-1] if errors else None

    def first_exception(self) -> str | None:
        """Return the first exception that is not merely the consequence of another one."""
        exceptions = (_EXCEPTION.search(line) for line in self._tail if not _SECONDARY_ERRORS.search(line))
        return next((f"{m[1]}: {m[2]}" for m in exceptions if m), None)

    def failure_report(self, name: str, how: str, *, was_ready: bool = False) -> str:
        """Return one line with the cause; unless the process reported it itself, the end of the log follows."""
        why = f" ({how})" if LACK_OF_MEMORY in how else ""  # the log does not have it
        cause = self.first_exception()
        if (ours := self.reported_error()) is not None:
            if cause is not None and _SECONDARY_ERRORS.search(ours):  # of its engine, which has said more
                ours = f"vLLM failed to start: {cause}"
            return f"{name}: {ours}{why}"
        head = f"{name} {'exited again and again' if was_ready else 'did not start'}: {cause + why if cause else how}"
        lines = self.tail(_SHOWN_LINES)
        if not lines:
            return head
        return "\n".join([head, f"  the end of {self.path} ({how}):", *(f"  | {line}" for line in lines)])

    def _cut(self) -> None:
        keep = min(self._max_bytes // 2, self._offset)
        with self.path.open("rb") as file:
            file.seek(self._offset - keep)
            write_private(self.path.with_suffix(".old"), file.read(keep))
        os.truncate(self.path, 0)  # O_APPEND: the process continues at the new end
        self._offset = 0


def _clean(line: bytes) -> str:
    text = line.rsplit(b"\r", 1)[-1] if b"\r" in line.rstrip(b"\r") else line  # progress bars rewrite their line
    decoded = text.decode(errors="replace")
    return decoded if is_json(decoded) else _ANSI.sub("", decoded).rstrip()[:_MAX_LINE_CHARACTERS]
