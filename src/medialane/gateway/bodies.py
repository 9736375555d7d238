"""Bodies of requests on their way in: what they are read into, how many bytes there may be, how slowly they may come.

A body is copied once, from the server's pieces into a buffer that has its declared length. Buffers are anonymous memory
that is used again: memory that grows while a body arrives is moved, and each new page of it costs the event loop a
fault. A buffer that somebody still has a view of is not used again.

All bodies share one budget, in which a request is charged with what it has sent so far, and from then until it ends
with the media that came inside its body.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import numpy as np

from medialane.core.errors import BodyMemoryExhausted, BodyTooLarge, ClientTooSlow
from medialane.gateway.config import GatewayConfig
from medialane.gateway.loop_fairness import LoopFairness
from medialane.observability.logging import RateLimitedWarning

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

#: Buffers have sizes of powers of two, this one at least.
_MIN_BUFFER_BYTES = 64 << 10
#: Of buffers that nobody uses, so many bytes are kept.
_MAX_IDLE_BYTES = 128 << 20

_warn = RateLimitedWarning(logging.getLogger(__name__))


class Buffers:
    """Memory for bodies. One per event loop."""

    def __init__(self, max_idle_bytes: int = _MAX_IDLE_BYTES) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._idle_bytes = 0
        self._idle: dict[int, list[mmap.mmap]] = {}

    def take(self, size: int) -> mmap.mmap:
        """A buffer of at least `size` bytes, whatever is in it. Raises BodyMemoryExhausted where there is no memory."""
        length = max(_MIN_BUFFER_BYTES, 1 << (size - 1).bit_length())
        if idle := self._idle.get(length):
            self._idle_bytes -= length
            return idle.pop()
        try:
            return mmap.mmap(-1, length)
        except OSError as error:
            _warn("no memory for a request body of %d bytes: %s", size, error)
            raise BodyMemoryExhausted("out of memory for the request body") from error

    def release(self, buffer: mmap.mmap) -> None:
        try:
            buffer.resize(len(buffer))  # refused while there is a view of it
        except BufferError:
            return  # it ends with its views
        if self._idle_bytes + len(buffer) > self._max_idle_bytes:
            buffer.close()
            return
        self._idle_bytes += len(buffer)
        self._idle.setdefault(len(buffer), []).append(buffer)


class Budget:
    """How many bytes all requests may hold together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def charge(self, num_bytes: int) -> None:
        """Add bytes, or take some off. Raises BodyMemoryExhausted for more than there may be."""
        if num_bytes > 0 and self.num_bytes + num_bytes > self._max_bytes:
            _warn("request bodies hold %d bytes: more are answered 503 (--gateway-max-bodies-bytes)", self.num_bytes)
            raise BodyMemoryExhausted("the memory budget for request bodies is exhausted")
        self.num_bytes += num_bytes


class BudgetCharge:
    """A request's part of the budget. `release` is idempotent."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def set(self, num_bytes: int) -> None:
        """Raises BodyMemoryExhausted, and charges what it did before then."""
        self._budget.charge(num_bytes - self._num_bytes)
        self._num_bytes = num_bytes

    def release(self) -> None:
        self.set(0)


class BoundedReceive:
    """A `receive` that holds the client to its bounds: `limit` bytes, the budget, a rate, a deadline.

    Time counts only while the client is waited for. Raises BodyTooLarge, BodyMemoryExhausted, ClientTooSlow.
    """

    def __init__(self, receive: Receive, limit: int, charge: BudgetCharge, config: GatewayConfig) -> None:
        self._receive = receive
        self._limit = limit
        self._charge = charge
        self._config = config
        self._num_bytes = 0
        self._waited_s = 0.0
        self._more = True

    async def __call__(self) -> Message:
        if not self._more:
            return await self._receive()  # the client's disconnecting, which may take as long as the answer
        message = await self._timed()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._limit:
            raise BodyTooLarge(f"the request body has more than {self._limit} bytes")
        self._charge.set(self._num_bytes)
        self._more = bool(message.get("more_body", False))
        return message

    async def _timed(self) -> Message:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._allowed_s() - self._waited_s):
                return await self._receive()
        except TimeoutError as error:
            _warn("a client sent %d bytes of a request's body in %g s", self._num_bytes, self._allowed_s())
            raise ClientTooSlow("the request body was sent too slowly") from error
        finally:
            self._waited_s += loop.time() - started

    def _allowed_s(self) -> float:
        """How long the client may have taken for what has come so far."""
        config = self._config
        if not config.min_body_rate_bytes_per_s:
            return config.body_timeout_s
        by_rate = config.min_body_rate_grace_s + self._num_bytes / config.min_body_rate_bytes_per_s
        return min(config.body_timeout_s, by_rate)


class Body:
    """A body that was read: the first `size` bytes of `buffer`, until `release`.

    A buffer that is not released ends with its last user, which may be a thread whose work nobody waits for any more.
    """

    def __init__(self, buffers: Buffers, declared: int) -> None:
        self._buffers = buffers
        self.buffer = buffers.take(declared)
        self.size = 0

    async def read(self, receive: Receive, fairness: LoopFairness) -> bool:
        """Read it whole. False if the client leaves first. Raises what `receive` raises."""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            piece = message.get("body", b"")
            if self.size + len(piece) > len(self.buffer):
                await self._grow(self.size + len(piece), fairness)
            async with fairness.step(len(piece)):
                self.buffer[self.size : self.size + len(piece)] = piece
            self.size += len(piece)
            if not message.get("more_body", False):
                return True

    def release(self) -> None:
        self._buffers.release(self.buffer)

    async def _grow(self, size: int, fairness: LoopFairness) -> None:
        """Move to a buffer for `size` bytes: a body of undeclared length."""
        old, new = self.buffer, self._buffers.take(size)

        def move() -> None:
            np.frombuffer(new, np.uint8, self.size)[:] = np.frombuffer(old, np.uint8, self.size)

        await fairness.run(self.size, move)
        self.buffer = new
        self._buffers.release(old)
