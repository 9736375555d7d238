"""Large bytes pass through the event loop one piece per turn of it.

One request's 10 MB cost the loop some milliseconds: pieces of the body taken in, base64 decoded, a hash, a copy into
the arena. When many such requests come at once, all their pieces are ready in the same turn of the loop, and everything
else waits for the sum. So each piece is a *step*, and a turn of the loop does one step, first come, first served. A
server that is not reading a body pauses its connection, so that waiting pieces are not held here.

A piece of megabytes is worked on in a thread while its step lasts: decoding base64 and hashing leave the interpreter
lock alone, and the pages of their results are made there, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")

#: Fewer bytes are no step: some 50 us at the most, less than it costs to wait for a turn.
SMALL_BYTES = 128 * 1024


#: From here a step is worth a thread.
LARGE_BYTES = 1024 * 1024


class LoopFairness:
    """One per event loop, shared by all who handle large bytes there. `close` ends its thread."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-bytes")

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Do `work` on so many bytes as a step, in the thread if they are many.

        Where the caller is cancelled meanwhile, the thread ends the work and its result is dropped: it owns nothing.
        """
        async with self.step(num_bytes):
            if num_bytes < LARGE_BYTES:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def step(self, num_bytes: int) -> AsyncIterator[None]:
        """Around work that takes time in proportion to `num_bytes`, and waits for nothing but further turns of the
        loop, in which it goes on piece by piece. It must not take a step itself: the next one waits for this one's end.

        May wait before the work; never after it, so that what the work has taken cannot be lost to a cancellation.
        """
        if num_bytes < SMALL_BYTES:
            yield
            return
        is_next_iteration = self._lock.locked()  # then we go on in the turn after that of the step before us
        async with self._lock:
            if not is_next_iteration:
                await asyncio.sleep(0)
            yield
