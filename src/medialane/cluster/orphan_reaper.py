"""Handle on the process that kills orphaned process groups if the supervisor dies."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import setproctitle

from medialane.cluster import process_group

#: Exit timeout of a process that has nothing left to do.
_END_S = 10

logger = logging.getLogger(__name__)


class OrphanReaper:
    """Registers the process groups that must not outlive this process. Created by the supervisor, ended by `close`."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        reader, self._pipe = os.pipe()
        # -I -S: no startup files, and site-packages only for the title; this takes 25 ms and 11 MB.
        packages = Path(setproctitle.__file__).parents[1]
        self._process = subprocess.Popen(  # noqa: S603 - our own script, no shell
            [sys.executable, "-I", "-S", str(Path(process_group.__file__)), str(packages)],
            stdin=reader,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
        )
        os.close(reader)

    @property
    def pid(self) -> int | None:
        """None once it has exited."""
        return self._process.pid if self._process.poll() is None else None

    def watch(self, group: int) -> None:
        self._groups.add(group)
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._groups.discard(group)
        self._send(f"-{group}\n")

    def close(self) -> None:
        """End the orphan reaper, after every group has exited or been killed. Takes milliseconds."""
        for group in list(self._groups):
            self.forget(group)
        os.close(self._pipe)
        self._process.wait(_END_S)

    def _send(self, line: str) -> None:
        try:
            # A few bytes, and the reader does nothing else: this does not block.
            os.write(self._pipe, line.encode())
        except BrokenPipeError:
            logger.warning("the orphan reaper has exited: children may survive a kill -9 of this process")
