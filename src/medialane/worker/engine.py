"""The engine that a worker drives, as this room needs it; `vllm_bridge` fills it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from medialane.core.request import EngineRequest, ModelCard, OutputDelta, WorkerLoad


class Engine(Protocol):
    """One engine in this process. All methods run on the event loop and never block it."""

    @property
    def card(self) -> ModelCard: ...

    def load(self) -> WorkerLoad: ...

    async def attach_arena(self, arena: str, nonce: bytes) -> bool:
        """Let the engine's own processes map the arena; True when they read the nonce back from it."""
        ...

    def generate(
        self, request: EngineRequest, tensors: Sequence[Sequence[memoryview]]
    ) -> AsyncGenerator[OutputDelta, None]:
        """Check the request, then generate. `tensors[i]` are the large tensors of the prompt's feature i.

        Raises InvalidFeature or PromptRejected before anything reaches the engine core, GenerationFailed after.
        When the generator has ended, or its `aclose` has returned, the engine reads no tensor of the request any more.
        """
        ...

    async def ping(self, timeout_s: float) -> None:
        """Prove that the engine core still takes requests. Raises GenerationFailed when it does not."""
        ...

    async def close(self) -> None: ...
