"""How tests wait: for a condition, with a deadline.

Elsewhere in tests a `sleep` says on its line, after "time:", why time itself is the subject (test_architecture.py).
"""

import asyncio
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TypeVar

DEADLINE_S = 10.0
_MIN_POLL_S, _MAX_POLL_S = 0.001, 0.05

T = TypeVar("T")


async def comes_true(condition: Callable[[], object | Awaitable[object]], timeout_s: float = DEADLINE_S) -> bool:
    """Poll `condition`, which may be a coroutine function. Return whether it became true before the timeout."""
    deadline, poll_s = time.monotonic() + timeout_s, _MIN_POLL_S
    while True:
        holds = condition()
        if await holds if isawaitable(holds) else holds:
            return True
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(poll_s)  # time: between two polls
        poll_s = min(1.5 * poll_s, _MAX_POLL_S)


def comes_true_sync(condition: Callable[[], object], timeout_s: float = DEADLINE_S) -> bool:
    deadline, poll_s = time.monotonic() + timeout_s, _MIN_POLL_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)  # time: between two polls
        poll_s = min(1.5 * poll_s, _MAX_POLL_S)
    return True


async def eventually(
    condition: Callable[[], object | Awaitable[object]],
    what: str = "",
    timeout_s: float = DEADLINE_S,
    *,
    more: Callable[[], object] = lambda: "",
) -> None:
    """Wait for `condition`. Raises AssertionError with `what` and the text of `more`."""
    assert await comes_true(condition, timeout_s), f"not within {timeout_s:g} s: {what}\n{more()}"


def wait_until(
    condition: Callable[[], object],
    what: str = "",
    timeout_s: float = DEADLINE_S,
    *,
    more: Callable[[], object] = lambda: "",
) -> None:
    """`eventually` without an event loop."""
    assert comes_true_sync(condition, timeout_s), f"not within {timeout_s:g} s: {what}\n{more()}"


async def retried(call: Callable[[], Awaitable[T]], error: type[Exception], timeout_s: float = DEADLINE_S) -> T:
    """Return the result of the first call that does not raise `error`."""
    results: list[T] = []

    async def succeeds() -> bool:
        try:
            results.append(await call())
        except error:
            return False
        return True

    await eventually(succeeds, f"a call without {error.__name__}", timeout_s)
    return results[0]


def line_of(process: subprocess.Popen[bytes], timeout_s: float = 30.0) -> bytes:
    """Return the next line of the process's output. After `timeout_s` the process is killed, which ends the wait.
    Raises AssertionError if there is no line."""
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
    finally:
        timer.cancel()
    assert line, f"process {process.pid} has exited, or was killed after {timeout_s:g} s"
    return line


async def iterations(number: int) -> None:
    """Let the event loop run what is ready, `number` times."""
    for _ in range(number):
        await asyncio.sleep(0)
