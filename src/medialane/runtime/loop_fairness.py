"""Fair scheduling on the event loop: of large payloads one chunk per iteration, of many small pieces of work a few.

A request of 10 MB costs the event loop a few milliseconds: receiving the body, decoding base64, hashing, copying into
the arena. If many such requests arrive at once, all their chunks are ready in the same iteration, and everything else
waits for the sum. So each chunk is a *step*, and an iteration of the event loop runs one step, FIFO. The server pauses
a connection whose body is not being read, so waiting chunks do not accumulate here.

A chunk of megabytes is processed in a thread for the duration of its step: base64 decoding and hashing release the GIL,
and the page faults of their results occur there, too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")

#: The first bytes of an iteration, at most this many, are not a step: at most 50 us, less than the cost of waiting for
#: an iteration.
SMALL_BYTES = 128 * 1024

#: Steps of at least this size run in the thread.
LARGE_BYTES = 1024 * 1024

#: Pieces of work that take 0.1 ms each, in one iteration of the event loop.
PIECES_PER_ITERATION = 16


class LoopFairness:
    """One per event loop, shared by all code that handles large payloads there. `close` stops its thread."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        #: Bytes processed in this iteration of the event loop without being a step.
        self._small_bytes = 0
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-bytes")

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Run `work`, which processes `num_bytes` bytes, as a step, in the thread from `LARGE_BYTES` on.

        If the caller is cancelled, the thread completes the work and the result is discarded, so it must not own
        resources.
        """
        async with self.step(num_bytes):
            if num_bytes < LARGE_BYTES:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def step(self, num_bytes: int) -> AsyncIterator[None]:
        """Context manager for work whose time is proportional to `num_bytes`, and that awaits nothing but further
        iterations of the event loop. Steps must not be nested: each waits for the end of the previous one.

        Small work does not wait, as long as all of it in this iteration has less than `SMALL_BYTES`.

        May wait before the work, never after it: resources that the work has acquired cannot be lost to a cancellation.
        """
        if self._small_bytes + num_bytes < SMALL_BYTES:
            if not self._small_bytes:
                asyncio.get_running_loop().call_soon(self._next_iteration)
            self._small_bytes += num_bytes
            yield
            return
        is_next_iteration = self._lock.locked()  # then we resume one iteration after the previous step
        async with self._lock:
            if not is_next_iteration:
                await asyncio.sleep(0)
            yield

    def _next_iteration(self) -> None:
        self._small_bytes = 0


class FewPerIteration:
    """Spreads many pieces of work, such as the prompts of one request, over iterations of the event loop."""

    def __init__(self) -> None:
        self._num_pieces = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next_piece(self) -> None:
        """Return when this iteration has done fewer than `PIECES_PER_ITERATION` pieces, FIFO. Without others, at
        once."""
        loop = asyncio.get_running_loop()
        if self._num_pieces < PIECES_PER_ITERATION and not self._waiting:
            if not self._num_pieces:
                loop.call_soon(self._next_iteration)
            self._num_pieces += 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_iteration(self) -> None:
        self._num_pieces = 0
        while self._waiting and self._num_pieces < PIECES_PER_ITERATION:
            turn = self._waiting.popleft()
            if not turn.done():  # otherwise cancelled
                turn.set_result(None)
                self._num_pieces += 1
        if self._num_pieces:
            asyncio.get_running_loop().call_soon(self._next_iteration)
