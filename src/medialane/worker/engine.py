"""The engine that a worker drives, as this room needs it; `vllm_bridge` fills it, `FakeEngine` for tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from medialane.core.admin import AdminCall, AdminResult
from medialane.core.kv_events import KvEventBatch
from medialane.core.request import EngineRequest, ModelCard, OutputDelta, WorkerLoad


class Engine(Protocol):
    """One engine in this process. All methods run on the event loop and never block it."""

    @property
    def card(self) -> ModelCard: ...

    def loads(self) -> Sequence[WorkerLoad]:
        """How busy each data-parallel rank is, in their order."""
        ...

    def watch_blocks(self, listener: Callable[[KvEventBatch], None]) -> None:
        """Call `listener`, on the event loop, with every change of the KV cache from the engine's start on.

        Called once, on the loop, before the first request. Batches of a rank come in order and soon after the step that
        they tell of, without gaps: where the engine has lost some, AllBlocksCleared comes in their place. `card`'s
        `block_size` is the size of the blocks that count.
        """
        ...

    async def attach_arena(self, arena: str, nonce: bytes) -> bool:
        """Let the engine's own processes map the arena; True when they read the nonce back from it.

        Raises WorkerLost when the engine has died.
        """
        ...

    async def detach_arena(self, arena: str) -> None:
        """Have the engine's own processes unmap the arena, of which they read nothing any more. Idempotent.

        Where they do not do it, it is logged: the arena's memory stays in use.
        """
        ...

    def generate(
        self, request: EngineRequest, tensors: Sequence[Sequence[memoryview]]
    ) -> AsyncGenerator[OutputDelta, None]:
        """Check the request, then generate. `tensors[i]` are the large tensors of the prompt's media item i.

        Raises InvalidFeature, PromptRejected, another InvalidRequest or Unavailable before anything reaches the engine
        core; HandoverFailed when the engine core cannot read the tensors; GenerationFailed when it fails the request,
        WorkerLost when it dies. When the generator has ended, or its `aclose` or its cancellation has come through, the
        engine reads no tensor of the request any more; where the engine does not confirm that, it does not end.
        """
        ...

    async def administer(self, call: AdminCall) -> AdminResult:
        """Do what an operator asks of the engine. A cancelled call may be done all the same.

        Raises InvalidRequest or Unavailable when the engine refuses, GenerationFailed when it fails, WorkerLost when it
        dies.
        """
        ...

    async def ping(self, timeout_s: float) -> None:
        """Prove that the engine core still takes requests.

        Raises GenerationFailed when it does not answer in time, WorkerLost when it has died or nothing is known about
        what it reads: this process cannot go on then.
        """
        ...

    async def close(self) -> None:
        """End the engine and its processes; nothing is read any more afterwards. Idempotent."""
        ...
