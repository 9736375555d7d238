"""Tasks: waiting for several coroutines or streams, none left running when the wait is over; a background task that
must live: whatever ends it, it is logged, reported, and started again; exponential backoff; deduplication of concurrent
work by key (singleflight); for whom a task runs, for the record that `--debug-holds` keeps; and fair scheduling on the
event loop: of large payloads one chunk per iteration, of many small pieces of work a few.

A request of 10 MB costs the event loop a few milliseconds: receiving the body, decoding base64, hashing, copying into
the arena. If many such requests arrive at once, all their chunks are ready in the same iteration, and everything else
waits for the sum. So each chunk is a *step*, and an iteration of the event loop runs one step, FIFO. The server pauses
a connection whose body is not being read, so waiting chunks do not accumulate here.

A chunk of megabytes is processed in a thread for the duration of its step: base64 decoding and hashing release the GIL,
and the page faults of their results occur there, too.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import PurePath
from types import FrameType
from typing import Any, Generic, Self, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

K = TypeVar("K", bound=Hashable)

#: Between an end of a watched task and its next start.
PAUSE_S = 1.0

#: How long after its last end it is reported as failing.
FAILING_S = 60.0


async def first_of(*waits: Awaitable[object]) -> None:
    """Wait until one of them ends, and raise its error if it has one; cancel the others, but for what is shielded."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, T]]) -> tuple[T, ...]:
    """Await all and return their results in order. The first error cancels the others and is raised as it is."""
    if len(work) == 1:
        return (await work[0],)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in work]
    except ExceptionGroup as group:
        first = group.exceptions[0]
    else:
        return tuple(task.result() for task in running)
    try:
        raise first
    finally:
        del first  # its traceback has this frame


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield what any of the streams yields, as it comes. The first error closes all, and is raised. Each is one step
    ahead of the reader at most."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield item
        return
    steps: dict[asyncio.Future[T], AsyncGenerator[T, None]] = {}
    try:
        steps |= {_step(stream): stream for stream in streams}
        while steps:
            ended, _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
            for step in ended:
                stream = steps.pop(step)
                try:
                    item = step.result()
                except StopAsyncIteration:
                    continue
                steps[_step(stream)] = stream
                yield item
    finally:
        for step in steps:
            step.cancel()
        if steps:
            await asyncio.wait(steps)
        for stream in streams:
            await stream.aclose()


def _step(stream: AsyncGenerator[T, None]) -> asyncio.Future[T]:
    return asyncio.ensure_future(anext(stream))


#: Of this process.
_tasks: set[WatchedTask] = set()


def has_failing_tasks() -> bool:
    """Whether a watched task of this process has ended by itself lately."""
    return any(task.is_failing for task in _tasks)


class WatchedTask:
    """Calls `work`, which must not end by itself, until `close`; again PAUSE_S after an end. Also a context manager."""

    def __init__(
        self,
        work: Callable[[], Awaitable[object]],
        name: str,
        *,
        pause_s: float = PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._name = name
        self._pause_s = pause_s
        self._clock = clock
        self._failed_at: float | None = None
        _tasks.add(self)
        self._task = asyncio.get_running_loop().create_task(self._run(), name=name)

    @property
    def is_failing(self) -> bool:
        """Whether it has ended by itself lately."""
        return self._failed_at is not None and self._clock() - self._failed_at < FAILING_S

    async def close(self) -> None:
        """Cancel it, and wait until it has ended. Idempotent."""
        _tasks.discard(self)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self) -> None:
        while True:
            ended: BaseException | None = None
            try:
                await self._work()
            except Exception as error:  # noqa: BLE001 - the supervisor of a task: it must live whatever fails
                ended = error
            self._failed_at = self._clock()
            logger.error("%s has ended unexpectedly, and is started again", self._name, exc_info=ended)
            await asyncio.sleep(self._pause_s)


class Backoff:
    """Delays that double from `initial_s` up to `max_s`. The owner sleeps, and calls `reset` after a success."""

    def __init__(self, *, initial_s: float, max_s: float) -> None:
        self._initial_s = initial_s
        self._max_s = max_s
        self._next_s = initial_s

    def next(self) -> float:
        """Return the delay before the next attempt, in seconds."""
        delay_s = self._next_s
        self._next_s = min(2 * delay_s, self._max_s)
        return delay_s

    def reset(self) -> None:
        self._next_s = self._initial_s


class _Flight(Generic[T]):
    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.num_waiters = 0
        self.is_released = False


def _itself(result: T) -> T:
    return result


class SingleFlight(Generic[K, T]):
    """Runs the work of a key once for all callers that arrive while it runs.

    Cancelling one caller does not affect the others; when the last one is cancelled, so is the work. An error is raised
    in every caller. Results are not cached after the flight.

    For results that must be released: each caller owns what `share` returns for the flight's result, and the flight's
    own result is passed to `release` after its last caller has left, however it left.
    """

    def __init__(self, *, share: Callable[[T], T] = _itself, release: Callable[[T], None] | None = None) -> None:
        self._flights: dict[K, _Flight[T]] = {}
        self._share = share
        self._release = release

    async def do(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work`, or of the work already running for `key`."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.get_running_loop().create_task(work()))
            flight.task.add_done_callback(lambda _: self._land(key, flight))
        flight.num_waiters += 1
        try:
            return self._share(await asyncio.shield(flight.task))
        finally:
            flight.num_waiters -= 1
            if not flight.num_waiters:
                self._land(key, flight)
                flight.task.cancel()

    def _land(self, key: K, flight: _Flight[T]) -> None:
        """Called when the work is done and when the last caller leaves; the later of the two releases the result."""
        if self._flights.get(key) is flight:
            del self._flights[key]
        if not flight.task.done() or flight.task.cancelled():
            return
        # Every waiter has received the error. Retrieve it here for the case that none is left, or asyncio logs
        # "exception was never retrieved".
        failed = flight.task.exception() is not None
        if not failed and not flight.num_waiters and not flight.is_released and self._release is not None:
            flight.is_released = True
            self._release(flight.task.result())

    def __contains__(self, key: K) -> bool:
        return key in self._flights

    def __len__(self) -> int:
        return len(self._flights)


#: The request, or the client of the store and its call, for which this task runs; empty unless holds are recorded.
TAKER: ContextVar[str] = ContextVar("medialane_taker", default="")

_NUM_FRAMES = 5

_PACKAGE = __name__.partition(".")[0]


def call_site(depth: int) -> str:
    """Return the innermost calls of medialane, without the `depth` innermost ones."""
    frame: FrameType | None = sys._getframe(depth + 1)  # noqa: SLF001 - CPython's; inspect's way reads source files
    calls: list[str] = []
    while frame is not None and len(calls) < _NUM_FRAMES:
        if frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
            calls.append(f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(calls)


# Fair scheduling on the event loop

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
