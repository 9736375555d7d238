"""A client of the store for synchronous programs: its link, with an event loop in a thread of its own.

The link must run while entries are held: it answers the store's heartbeats, and connects again to the next store if one
is lost, which learns from it what is held.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from medialane.runtime.tasks import gather_or_cancel
from medialane.store.client import StoreLink
from medialane.store.messages import FindFeature, ItemFound
from medialane.types.errors import (
    HandoverFailed,
    MedialaneError,
    NoWorkerReady,
    StoreUnavailable,
    UnknownMedia,
    WorkerLost,
)
from medialane.types.feature import Feature
from medialane.types.tensor import TensorDescriptor
from medialane.wire.config import RpcConfig

#: For what takes no longer than some messages.
_END_S = 10.0

T = TypeVar("T")


class StoreThread:
    """A context manager: connected, and mapping the arena, within its block. Its holds end with it."""

    def __init__(self, address: str, arena_directory: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._address = address
        self._link = StoreLink(address, rpc=RpcConfig(), arena_directory=arena_directory, wait_timeout_s=timeout_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="medialane client", daemon=True)
        self._running: asyncio.Task[None] | None = None
        self._holds: list[tuple[int, str]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._wait(self._start())
        except BaseException:  # KeyboardInterrupt included: the thread must not be left behind
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def hold(self, hashes: Sequence[str]) -> dict[str, Feature]:
        """Find features and hold them until the end. Raises UnknownMedia naming the hash, StoreUnavailable."""
        return self._wait(self._hold_all(hashes))

    def tensor(self, descriptor: TensorDescriptor) -> memoryview:
        """Return the bytes of a tensor that is held, read-only."""
        return self._link.tensor(descriptor)

    async def _start(self) -> None:
        try:
            await self._link.connect()
        except MedialaneError as error:
            raise _unreachable(self._address, error) from error
        self._running = self._loop.create_task(self._link.run(), name="the connection to the media store")

    async def _hold_all(self, hashes: Sequence[str]) -> dict[str, Feature]:
        return dict(zip(hashes, await gather_or_cancel([self._hold(name) for name in hashes]), strict=True))

    async def _hold(self, mm_hash: str) -> Feature:
        try:
            found = await self._link.call(lambda call_id: FindFeature(call_id, mm_hash))
        except UnknownMedia as error:
            raise UnknownMedia(f"the media store does not know the feature {mm_hash}, or not any more") from error
        if not isinstance(found, ItemFound) or found.feature is None:
            raise StoreUnavailable("the media store has answered something else than a feature")
        self._holds.append((found.hold_id, found.range.arena))
        return found.feature

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop until it is done, at most `timeout_s`."""

        async def in_time() -> T:
            async with asyncio.timeout(self._timeout_s):
                return await work

        running: Future[T] = asyncio.run_coroutine_threadsafe(in_time(), self._loop)
        try:
            return running.result()
        except TimeoutError as error:
            raise StoreUnavailable(f"the media store did not answer within {self._timeout_s:g} s") from error
        except BaseException:  # KeyboardInterrupt, say
            running.cancel()
            raise

    def _end(self) -> None:
        ending = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        try:
            ending.result(_END_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_END_S)
            if not self._thread.is_alive():
                self._loop.close()

    async def _close(self) -> None:
        for hold_id, arena in self._holds:
            self._link.release(hold_id, arena)
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])


def _unreachable(address: str, error: MedialaneError) -> StoreUnavailable:
    """Return an error that says what to do."""
    match error:
        case NoWorkerReady():
            advice = "is medialane running on this host, and is the socket's folder visible here?"
        case WorkerLost():
            advice = "only the user who runs the store may open its socket"
        case HandoverFailed():
            advice = (
                "this process must share the store's /dev/shm (the container's IPC namespace, or a volume) and user; "
                "elsewhere, get features by HTTP"
            )
        case _:
            advice = ""
    return StoreUnavailable(f"{address}: {error.message}{f': {advice}' if advice else ''}")
