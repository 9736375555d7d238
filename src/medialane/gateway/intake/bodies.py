"""Receiving request bodies: buffers, memory budget, minimum rate and timeout.

A body is copied once, from the server's chunks into a buffer of its declared length. Buffers are anonymous mappings and
are reused: memory that grows while a body arrives has to be moved, and each new page costs the event loop a page fault.
A buffer that still has exported views is not reused.

All bodies share one memory budget, unused buffers included. A request is charged for the bytes that it has sent, and
after intake, until it ends, for its remaining body and the media extracted from it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import time
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from medialane.gateway.config import GatewayConfig
from medialane.runtime.tasks import LoopFairness
from medialane.types.errors import BodyMemoryExhausted, BodyTooLarge, ClientTooSlow, ConcurrencyLimitExceeded, Permits
from medialane.types.media_lease import TenantShares

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

#: Methods whose bodies have no meaning; no handler reads them.
WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})

#: Buffer sizes are powers of two, at least this.
_MIN_BUFFER_BYTES = 64 << 10
#: Share of the limit that unused buffers may have: first use of a page costs microseconds, unmapping 10 MB costs 2 ms.
_IDLE_SHARE = 4
#: Unused buffers are unmapped after this time.
IDLE_S = 30.0

logger = logging.getLogger(__name__)


class BodyMemory:
    """The limit on the bytes of all requests together, and the buffers of their bodies: what is charged and what unused
    buffers have is at most `max_bytes`. The requests of one tenant have a share of that, and `least_share` bytes in
    any case. Buffers that are not used for `idle_s` are unmapped. One per event loop."""

    def __init__(
        self,
        max_bytes: int,
        *,
        tenant_share: float = 1.0,
        least_share: int = 1,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._charged = TenantShares(max_bytes, tenant_share=tenant_share, least_share=least_share)
        self._clock = clock
        #: The charges that are not 0.
        self.permits = Permits(clock=clock)
        self._idle_s = idle_s
        self._idle_bytes = 0
        #: Unused buffers, by their length, with the time since when, oldest first.
        self._idle: dict[int, deque[tuple[mmap.mmap, float]]] = {}
        self._trimming: asyncio.TimerHandle | None = None

    @property
    def num_bytes(self) -> int:
        """What is charged."""
        return self._charged.used

    def charge(self, num_bytes: int, tenant: str = "") -> None:
        """Add bytes, or subtract if negative. Raises BodyMemoryExhausted if the limit would be exceeded,
        ConcurrencyLimitExceeded if the tenant's would."""
        if tenant and num_bytes > 0 and num_bytes > self._charged.free_of(tenant):
            most = self._charged.most_of(tenant)
            message = f"the bodies of this API key's requests in flight have {most} bytes, its share of their memory"
            raise ConcurrencyLimitExceeded(message, retry_after_s=self.permits.promise())
        if num_bytes > 0 and num_bytes > self._charged.free:
            logger.warning(
                "request bodies hold %d bytes: rejecting with 503 (--gateway-max-bodies-bytes)", self.num_bytes
            )
            message = "the memory budget for request bodies is exhausted"
            raise BodyMemoryExhausted(message, retry_after_s=self.permits.promise())
        self._charged.add(tenant, num_bytes)
        if self.num_bytes + self._idle_bytes > self._max_bytes:
            self._unmap_idle(math.inf)

    def take(self, size: int) -> mmap.mmap:
        """Return a buffer of at least `size` bytes, contents undefined. Raises BodyMemoryExhausted if out of memory."""
        length = max(_MIN_BUFFER_BYTES, 1 << (size - 1).bit_length())
        if idle := self._idle.get(length):
            self._idle_bytes -= length
            return idle.pop()[0]
        try:
            # Private: a shared mapping, the default, takes half as long again for each page fault.
            return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            logger.warning("no memory for a request body of %d bytes: %s", size, error)
            raise BodyMemoryExhausted("out of memory for the request body") from error

    def release(self, buffer: mmap.mmap) -> None:
        """Take back a buffer, to be reused or unmapped."""
        try:
            buffer.resize(len(buffer))  # raises BufferError while it has exported views
        except BufferError:
            return  # freed with its last view
        max_idle_bytes = min(self._max_bytes // _IDLE_SHARE, self._max_bytes - self.num_bytes)
        if self._idle_bytes + len(buffer) > max_idle_bytes:
            _unmap([buffer])
            return
        self._idle_bytes += len(buffer)
        self._idle.setdefault(len(buffer), deque()).append((buffer, self._clock()))
        if self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(self._idle_s, self._trim)

    def _trim(self) -> None:
        self._trimming = None
        self._unmap_idle(self._clock() - self._idle_s)
        if self._idle:
            self._trimming = asyncio.get_running_loop().call_later(self._idle_s, self._trim)

    def _unmap_idle(self, before: float) -> None:
        """Unmap the buffers that have not been used since `before`."""
        old: list[mmap.mmap] = []
        for length, idle in list(self._idle.items()):
            while idle and idle[0][1] <= before:
                old.append(idle.popleft()[0])
                self._idle_bytes -= length
            if not idle:
                del self._idle[length]
        _unmap(old)


def _close(buffers: Sequence[mmap.mmap]) -> None:
    for buffer in buffers:
        buffer.close()


def _unmap(buffers: Sequence[mmap.mmap]) -> None:
    """Unmap buffers in a thread, which does not hold the GIL meanwhile: the loop would be blocked for milliseconds."""
    if buffers:
        asyncio.get_running_loop().run_in_executor(None, partial(_close, buffers))


class BudgetCharge:
    """What a request, of this tenant if of any, has of the memory for bodies. `release` is idempotent."""

    def __init__(self, memory: BodyMemory, tenant: str = "") -> None:
        self._memory = memory
        self._tenant = tenant
        self._num_bytes = 0

    def set(self, num_bytes: int) -> None:
        """Charge `num_bytes` instead of the previous amount, which stays charged if this raises what `charge` does."""
        self._memory.charge(num_bytes - self._num_bytes, self._tenant)
        self._num_bytes = num_bytes
        if num_bytes:
            self._memory.permits.take(self)
        else:
            self._memory.permits.free(self)

    def add(self, num_bytes: int) -> None:
        """Charge more. Raises BodyMemoryExhausted."""
        self.set(self._num_bytes + num_bytes)

    def release(self) -> None:
        self.set(0)


class BoundedReceive:
    """A `receive` that enforces the limits of a body: `limit` bytes, the budget, the minimum rate, the timeout.

    Only the time spent waiting for the client counts. Raises BodyTooLarge, BodyMemoryExhausted, ClientTooSlow.
    """

    def __init__(
        self, receive: Receive, limit: int, charge: BudgetCharge, config: GatewayConfig, *, keeps: bool = True
    ) -> None:
        """Unless the caller `keeps` what it has received, only the last message is charged."""
        self.keeps = keeps
        self._receive = receive
        self._limit = limit
        self._charge = charge
        self._config = config
        self._num_bytes = 0
        self._waited_s = 0.0
        self._more = True

    async def __call__(self) -> Message:
        if not self._more:
            return await self._receive()  # waits for the disconnect, for as long as the response takes
        message = await self._timed()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._limit:
            raise BodyTooLarge(f"the request body has more than {self._limit} bytes")
        self._charge.set(self._num_bytes if self.keeps else len(message.get("body", b"")))
        self._more = bool(message.get("more_body", False))
        return message

    async def _timed(self) -> Message:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._config.body_seconds(self._num_bytes) - self._waited_s):
                return await self._receive()
        except TimeoutError as error:
            logger.warning("a client sent only %d bytes of a request body in %g s", self._num_bytes, self._waited_s)
            raise ClientTooSlow("the request body was sent too slowly") from error
        finally:
            self._waited_s += loop.time() - started


class BodyBuffer:
    """A received body: the first `size` bytes of `buffer`, until `release`.

    A buffer that is not released is freed with its last reference, which may be held by a thread after a cancellation.
    """

    def __init__(self, memory: BodyMemory, declared: int) -> None:
        self._memory = memory
        self.buffer = memory.take(declared)
        self.size = 0

    async def read(self, receive: Receive, fairness: LoopFairness) -> bool:
        """Read the whole body. False if the client disconnects first. Raises what `receive` raises."""
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
        self._memory.release(self.buffer)

    async def _grow(self, size: int, fairness: LoopFairness) -> None:
        """Move to a buffer for `size` bytes. Needed for bodies of undeclared length."""
        old, new = self.buffer, self._memory.take(size)

        def move() -> None:
            np.frombuffer(new, np.uint8, self.size)[:] = np.frombuffer(old, np.uint8, self.size)

        await fairness.run(self.size, move)
        self.buffer = new
        self._memory.release(old)


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields `body` once, and then the server's messages (the disconnect)."""
    pending = [body]

    async def replayed() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replayed
