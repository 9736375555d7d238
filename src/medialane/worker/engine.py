"""The engine interface of a worker; implemented by `vllm_bridge`, and by `FakeEngine` for tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from medialane.types.admin import AdminCall, AdminResult
from medialane.types.feature import EmbeddingUse
from medialane.types.kv_events import KvEventBatch
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

    @property
    def longest_embedding_step_s(self) -> float:
        """How long looking up embeddings has taken at most in one step of the scheduler, as of the last `ping`."""
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
        request, WorkerLost if it dies. Once the generator has ended, also by `aclose` or cancellation, the engine no
        longer reads tensors of the request; the generator does not end before the engine confirms that.
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
