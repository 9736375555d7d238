"""The two servers that are compared: started here one at a time, or running already."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

from medialane.check.progress import CheckProgress
from medialane.check.servers import Launch, Start, medialane_process, plain_process
from medialane.core.errors import StartupFailed

PLAIN, OURS = "plain vLLM", "medialane"


class RunningServer(NamedTuple):
    """`base_url` is without /v1. `process_id` is that of the first of its processes, None if it runs elsewhere."""

    base_url: str
    process_id: int | None


@dataclass(frozen=True)
class Side:
    """`run` starts the server for the time of the block, the nth time."""

    name: str
    run: Callable[[int], AbstractAsyncContextManager[RunningServer]]


def sides_of(against: Sequence[str], launch: Launch, progress: CheckProgress) -> tuple[Side, Side]:
    """Return plain vLLM and medialane; of servers that run already, one instead of plain vLLM, or two. Raises
    StartupFailed."""
    running = [_running(each) for each in against]
    ours = Side(OURS, partial(_started, medialane_process, launch, progress))
    match running:
        case []:
            return Side(PLAIN, partial(_started, plain_process, launch, progress)), ours
        case [baseline]:
            return baseline, ours
        case [baseline, other]:
            return baseline, other
    raise StartupFailed("--against: at most two servers are compared")


@asynccontextmanager
async def _started(start: Start, launch: Launch, progress: CheckProgress, number: int) -> AsyncIterator[RunningServer]:
    async with start(launch, progress, number) as process:
        yield RunningServer(process.base_url.removesuffix("/v1"), process.process_id)


def _running(text: str) -> Side:
    """Read [NAME=]URL. Raises StartupFailed."""
    name, separator, url = text.rpartition("=") if "=" in text.partition("://")[0] else ("", "", text)
    url = url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or (separator and not name):
        raise StartupFailed(f"--against {text}: it takes [NAME=]URL, such as vllm=http://127.0.0.1:8000")

    @asynccontextmanager
    async def run(_number: int) -> AsyncIterator[RunningServer]:
        yield RunningServer(url, None)

    return Side(name or parts.netloc, run)
