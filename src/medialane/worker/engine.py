"""The engine interface of a worker; implemented by `vllm_bridge`, and by `FakeEngine` for tests.

`StallWatch` finds out whether the engine is stalled: it hangs, and is not merely in a long step. An engine replies to a
ping between two of its steps. While it does not, it is either in a step (a long prefill, the first compilation, an
adapter being loaded), and its processes compute, or it hangs: stopped, swapped out, waiting for a lock or a device. So
an engine is stalled after a time without a reply in which its processes have used no CPU time to speak of. One that
computes for ever is found by the ping's own timeout. It is no longer stalled with its next reply.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, Protocol

from medialane.types.admin import AdminCall, AdminResult
from medialane.types.feature import EmbeddingUse
from medialane.types.kv_blocks import KvEventBatch
from medialane.types.request import EmbeddingCounts, EngineRequest, ModelCard, OutputDelta, WorkerLoad


class Engine(Protocol):
    """One engine in this process. All methods run on the event loop and never block it."""

    @property
    def card(self) -> ModelCard:
        """An administrative call may replace its encoder."""
        ...

    @property
    def embedding_counts(self) -> EmbeddingCounts:
        """As of the last `ping`."""
        ...

    def loads(self) -> Sequence[WorkerLoad]:
        """Return the load of each data-parallel rank, in order."""
        ...

    def watch_blocks(self, listener: Callable[[KvEventBatch], None]) -> None:
        """Call `listener`, on the event loop, with every change of the KV cache since the engine's start.

        Called once, on the event loop, before the first request. Batches of a rank arrive in order, soon after their
        step and without gaps: if events were lost, AllBlocksCleared replaces them. The `card`'s `block_size` is the
        size of the blocks that count.
        """
        ...

    async def attach_arena(self, arena: str, nonce: bytes) -> bool:
        """Have the engine's own processes map the arena; return True if they read this nonce from it.

        Raises WorkerLost if the engine has died.
        """
        ...

    async def detach_arena(self, arena: str) -> None:
        """Have the engine's own processes unmap the arena, which they no longer read. Idempotent.

        Failures are logged: the arena's memory stays in use then.
        """
        ...

    def generate(
        self,
        request: EngineRequest,
        tensors: Sequence[Sequence[memoryview]],
        embeddings: Sequence[EmbeddingUse | None] = (),
    ) -> AsyncGenerator[OutputDelta, None]:
        """Validate the request, then generate. `tensors[i]` are the large tensors of the prompt's media item i,
        `embeddings[i]` is its embedding, if any; an item whose embedding is loaded has no large tensors.

        Raises InvalidFeature, PromptRejected, another InvalidRequest or Unavailable before the request reaches the
        engine core; HandoverFailed if the engine core cannot read the tensors; GenerationFailed if it fails the
        request, WorkerLost if it dies, or needs tensors once more that it cannot read. Once the generator has ended,
        also by `aclose` or cancellation, the engine no longer reads tensors of the request; the generator does not end
        before the engine confirms that. If it is cancelled, KV blocks that it was to read are released; it may have an
        output more, with `kv_params` that another worker is to release.
        """
        ...

    async def administer(self, call: AdminCall) -> AdminResult:
        """Execute an administrative call. A cancelled call may still complete.

        Raises InvalidRequest or Unavailable if the engine refuses it, GenerationFailed if it fails, WorkerLost if the
        engine dies.
        """
        ...

    async def ping(self, timeout_s: float) -> None:
        """Check that the engine core still processes requests.

        Raises GenerationFailed if it does not respond before the timeout; WorkerLost if it has died, or it is unknown
        which tensors it reads: this process must exit then.
        """
        ...

    async def used_cpu_s(self) -> float | None:
        """Return the CPU time that the engine core's processes have used so far; None if one of them is stopped."""
        ...

    async def close(self) -> None:
        """Terminate the engine and its processes; no tensors are read afterwards. Idempotent."""
        ...


logger = logging.getLogger(__name__)

#: How often an engine that does not reply is looked at, at most, in seconds.
TICK_S = 1.0

#: Share of a core that is work: idle threads and timers use less.
MIN_CPU_SHARE = 0.02


class StallWatch:
    """Watches calls of the engine. Intervals in which this process itself did not run are not counted."""

    def __init__(self, engine: Engine, *, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._tick_s = min(TICK_S, timeout_s / 5)
        self._replied_at = time.monotonic()
        self.is_stalled = False

    async def watch(self, call: Coroutine[Any, Any, None]) -> None:
        """Await a call to which the engine replies between two steps. Raises what it raises."""
        calling = asyncio.create_task(call)
        try:
            await self._until_done(calling)
        finally:
            calling.cancel()
            await asyncio.wait((calling,))
        calling.result()
        self._replied()

    async def _until_done(self, calling: asyncio.Task[None]) -> None:
        silent_s = min(time.monotonic() - self._replied_at, self._timeout_s / 2)
        cpu_s: float | None = None
        while not (await asyncio.wait((calling,), timeout=self._tick_s))[0]:
            before_s, cpu_s = cpu_s, await self._engine.used_cpu_s()
            works = before_s is not None and cpu_s is not None and cpu_s - before_s >= MIN_CPU_SHARE * self._tick_s
            silent_s = 0.0 if works else silent_s + self._tick_s
            if silent_s >= self._timeout_s and not self.is_stalled:
                self.is_stalled = True
                logger.error("the engine is stalled: no reply and no work of its processes for %g s", silent_s)

    def _replied(self) -> None:
        self._replied_at = time.monotonic()
        if self.is_stalled:
            logger.warning("the engine is no longer stalled")
        self.is_stalled = False
