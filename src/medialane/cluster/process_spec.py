"""What is started, and how it is known to be ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import aiohttp


class ReadyCheck(Protocol):
    """Tells whether a part does its work."""

    def reset(self) -> None:
        """Forget an earlier life of the part; called before each start."""
        ...

    async def passes(self) -> bool:
        """Look once. Answers within seconds, and False rather than raising."""
        ...


@dataclass(frozen=True)
class ProcessSpec:
    """One process to keep running. `environ` is its whole environment.

    Parts of a higher `layer` are stopped first; `after` names a part that must have been ready before this one is
    started for the first time.
    """

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)
    ready: ReadyCheck
    layer: int = 0
    after: str | None = None
    stop_timeout_s: float = 10.0


@dataclass(frozen=True)
class SocketExists:
    """Ready when the part has made its unix socket: a worker does that last. Looking does not disturb it."""

    path: Path

    def reset(self) -> None:
        self.path.unlink(missing_ok=True)

    async def passes(self) -> bool:
        return self.path.is_socket()


@dataclass(frozen=True)
class HttpAnswers:
    """Ready when `url` answers 200. A certificate is not verified: it is this machine that is asked."""

    url: str
    timeout_s: float = 2.0

    def reset(self) -> None:
        """There is nothing to forget."""

    async def passes(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(self.url, ssl=False) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False
