"""A deterministic handler without an engine, for tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry

from medialane.observability.worker_metrics import MetricReader
from medialane.types.admin import AdminCall, AdminResult
from medialane.types.errors import MedialaneError
from medialane.types.kv_events import KvChange
from medialane.types.request import CompletionDelta, EncoderCard, EngineRequest, ModelCard, OutputDelta, WorkerLoad
from medialane.types.stats import MetricChanges
from medialane.wire.protocol import Hello, Welcome

FAKE_CARD = ModelCard(model="fake", max_model_len=4096, block_size=16, processor={})


class FakeHandler:
    """Outputs `token_ids` for every request, one delta each, the last one finished.

    It waits `delay_s` before each token, and `release_s` after the last token or a cancellation before the generator
    ends. `error` is raised instead of token number `fail_at`, `refusal` by `register`. Calls are recorded in `hellos`,
    `requests`, `num_tokens` (sent), `num_active` (generators that have not ended) and `num_cancelled`.
    `card` may be replaced by one with another encoder.
    All blocks belong to the first rank: `blocks`, changed by `change_blocks`. Administrative calls are recorded in
    `calls` and return `admin_result` after `delay_s`; `registry` holds its metrics.
    """

    def __init__(
        self,
        token_ids: Sequence[int] = (1, 2, 3),
        *,
        worker_id: str = "fake-worker",
        card: ModelCard = FAKE_CARD,
        delay_s: float = 0.0,
        release_s: float = 0.0,
        error: Exception | None = None,
        fail_at: int = 0,
        refusal: MedialaneError | None = None,
    ) -> None:
        self._token_ids = tuple(token_ids)
        self.card = card
        self._welcome = Welcome(worker_id, os.getpid(), card)
        self._delay_s = delay_s
        self._release_s = release_s
        self._error = error
        self._fail_at = fail_at
        self.is_stalled = False
        self.is_draining = False
        self.has_unknown_blocks = False
        self._refusal = refusal
        self.hellos: list[Hello] = []
        self.requests: list[EngineRequest] = []
        self.blocks: dict[int, None] = {}
        self.arena: str | None = None
        self.arena_listeners: list[Callable[[str | None], None]] = []
        self.block_listeners: list[Callable[[KvChange], None]] = []
        self.num_tokens = 0
        self.num_active = 0
        self.num_cancelled = 0
        self.calls: list[AdminCall] = []
        self.admin_result: AdminResult | Exception = None
        self.registry = CollectorRegistry()

    @property
    def encoder(self) -> EncoderCard | None:
        return self.card.encoder

    async def register(self, hello: Hello) -> Welcome:
        self.hellos.append(hello)
        if self._refusal is not None:
            raise self._refusal
        return self._welcome

    async def run(self, request: EngineRequest) -> AsyncGenerator[OutputDelta, None]:
        self.requests.append(request)
        self.num_active += 1
        try:
            for number, token_id in enumerate(self._token_ids):
                await asyncio.sleep(self._delay_s)
                if self._error is not None and number == self._fail_at:
                    raise self._error
                self.num_tokens += 1
                yield self._delta(request, number, token_id)
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            try:
                if self._release_s:
                    await asyncio.sleep(self._release_s)
            finally:
                self.num_active -= 1

    def drain(self) -> None:
        self.is_draining = True

    def loads(self) -> list[WorkerLoad]:
        ranks = self._welcome.card.data_parallel_size
        return [WorkerLoad(num_running=self.num_active)] + [WorkerLoad()] * (ranks - 1)

    def watch_arena(self, listener: Callable[[str | None], None]) -> Callable[[], None]:
        self.arena_listeners.append(listener)
        listener(self.arena)
        return lambda: self.arena_listeners.remove(listener)

    def map_arena(self, arena: str | None) -> None:
        """Change `arena` and notify the listeners."""
        self.arena = arena
        for listener in list(self.arena_listeners):
            listener(arena)

    def watch_blocks(self, listener: Callable[[KvChange], None]) -> Callable[[], None]:
        self.block_listeners.append(listener)
        return lambda: self.block_listeners.remove(listener)

    async def administer(self, call: AdminCall) -> AdminResult:
        self.calls.append(call)
        await asyncio.sleep(self._delay_s)
        if isinstance(self.admin_result, Exception):
            raise self.admin_result
        return self.admin_result

    def metrics(self) -> Callable[[], list[MetricChanges]]:
        return MetricReader(self.registry).read

    def held_blocks(self) -> Mapping[int, Sequence[int]]:
        return {0: list(self.blocks)}

    def change_blocks(self, stored: Iterable[int] = (), removed: Iterable[int] = (), *, clear: bool = False) -> None:
        """Change the blocks and notify the listeners; parameters as in KvChange, `clear` is its `snapshot`."""
        stored, removed = list(stored), list(removed)
        if clear:
            self.blocks.clear()
        self.blocks.update(dict.fromkeys(stored))
        for block_id in removed:
            self.blocks.pop(block_id, None)
        packed = [b"".join(block_id.to_bytes(8, "little") for block_id in ids) for ids in (stored, removed)]
        for listener in list(self.block_listeners):
            listener(KvChange(0, 0, packed[0], packed[1], snapshot=clear))

    def _delta(self, request: EngineRequest, number: int, token_id: int) -> OutputDelta:
        finished = number == len(self._token_ids) - 1
        completion = CompletionDelta(0, f"<{token_id}>", [token_id], finish_reason="stop" if finished else None)
        prompt = request.prompt.token_ids if number == 0 else None
        return OutputDelta(request.request_id, [completion], finished=finished, prompt_token_ids=prompt)
