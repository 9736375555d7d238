"""Specifications of supervised processes, and checks that they are ready."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import aiohttp

from medialane.cluster.warm import WarmProcess

#: Exit status of a process that is not needed (EX_UNAVAILABLE of sysexits.h): it is not started again.
NOT_NEEDED = 69
#: Begins the command lines of our processes. -P: nothing is imported from the working directory.
INTERPRETER = (sys.executable, "-P", "-m", "medialane")


class ReadyCheck(Protocol):
    """Checks whether a process is ready."""

    def reset(self) -> None:
        """Forget the previous run; called before each start."""
        ...

    async def passes(self) -> bool:
        """Check once. Must return within seconds, and False instead of raising."""
        ...


@dataclass(frozen=True)
class ProcessSpec:
    """One process to keep running. `environ` is its whole environment. It inherits the descriptors `pass_fds`, which
    must stay open here.

    With `is_ready_later` the check passes before the process has loaded everything: it is shown as ready when it enters
    the phase `READY`.

    Processes of a higher `layer` are stopped first; `after` names a process that must have been ready before this one
    is started for the first time. `not_needed` is what is shown if it exits with that status.

    One that `reloads` reads its settings again on SIGHUP.

    With `warm` it is a fork of that process if possible.
    """

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)
    ready: ReadyCheck
    layer: int = 0
    after: str | None = None
    stop_timeout_s: float = 10.0
    pass_fds: tuple[int, ...] = ()
    is_ready_later: bool = False
    not_needed: str = "not needed"
    warm: WarmProcess | None = None
    reloads: bool = False


@dataclass(frozen=True)
class SocketExists:
    """Ready when the process has created its unix socket, which a worker does last. The check does not disturb it."""

    path: Path

    def reset(self) -> None:
        self.path.unlink(missing_ok=True)

    async def passes(self) -> bool:
        return self.path.is_socket()


@dataclass(frozen=True)
class HttpAnswers:
    """Ready when `url` returns 200, or another of `statuses`, over the unix socket `path` if given. The certificate is
    not verified: the request goes to this host."""

    url: str
    path: Path | None = None
    timeout_s: float = 2.0
    statuses: frozenset[int] = frozenset({200})

    def reset(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    async def passes(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        try:
            connector = aiohttp.UnixConnector(str(self.path)) if self.path is not None else None
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.get(self.url, ssl=False) as response,
            ):
                return response.status in self.statuses
        except (aiohttp.ClientError, TimeoutError):
            return False
