"""A server of the check that is started again after a request has ended it, so that the next case has an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from medialane.tools.check.case import Answer, Request
from medialane.tools.check.client import CheckClient
from medialane.tools.check.progress import CheckProgress
from medialane.types.errors import StartupFailed

#: Is given how many times it was called, this time included.
Start = Callable[[int], AbstractAsyncContextManager[CheckClient]]

_SERVER_ERROR = 500
#: Until a server has noticed that its engine has ended.
SETTLE_S = 1.0
#: More, and something else than single requests ends it.
MAX_STARTS = 20


class RevivedServer:
    """Use it in `async with RevivedServer.opened(...)`. Not for concurrent requests. `client` is connected to the last
    start."""

    def __init__(
        self, name: str, start: Start, progress: CheckProgress, *, asks_again: bool, settle_s: float = SETTLE_S
    ) -> None:
        self._settle_s = settle_s
        self._name, self._start, self._progress = name, start, progress
        self._asks_again = asks_again
        self._running = AsyncExitStack()
        self._num_starts = 0
        self.client: CheckClient

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, name: str, start: Start, progress: CheckProgress, *, asks_again: bool = False, settle_s: float = SETTLE_S
    ) -> AsyncIterator[RevivedServer]:
        """`start` runs the server and connects to it; `asks_again`: a request at which it fails is sent once more.
        `settle_s` passes before an error counts as one of a live server."""
        server = cls(name, start, progress, asks_again=asks_again, settle_s=settle_s)
        try:
            await server._start_it()
            yield server
        finally:
            await server._running.aclose()

    async def post(self, request: Request) -> Answer:
        """Send a request. If it ends the server, that is started again before this returns. Raises StartupFailed if it
        does not start, or has been started too often."""
        answer = await self.client.post(request)
        if answer.status and answer.status < _SERVER_ERROR:
            return answer
        await asyncio.sleep(self._settle_s)
        if not await self.client.is_healthy():
            self._progress.note(f"{self._name} has ended ({answer.status or answer.document}) and is started again")
            await self._running.aclose()
            await self._start_it()
        elif self._asks_again:
            return await self.client.post(request)
        return answer

    async def _start_it(self) -> None:
        if self._num_starts == MAX_STARTS:
            raise StartupFailed(f"{self._name} has ended {MAX_STARTS} times")
        self._num_starts += 1
        self.client = await self._running.enter_async_context(self._start(self._num_starts))
