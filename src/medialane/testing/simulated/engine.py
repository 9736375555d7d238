"""A simulated engine (implements `worker.Engine`): caches and queues of a real one, computation replaced by delays; and
the workers that have one, any number of them in one process and on one event loop (`serve_simulated`).

Each step is planned by `Scheduler`, lasts as long as the settings define for its work, and reports its KV events when
it is complete, like vLLM. Steps have a schedule of their own: one that ends late on a busy machine does not delay the
next ones. Tensors of features are never read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import msgspec

from medialane.runtime.resources import MemoryUse
from medialane.runtime.stop import DRAIN_TIMEOUT_S, stopped_by_signals
from medialane.testing.simulated.config import SimulatedConfig
from medialane.testing.simulated.scheduler import EncoderCache, Scheduler, SimulatedStep
from medialane.testing.simulated.sequence import BlockPool, SimulatedParams, SimulatedSequence, sequence_of, token_texts
from medialane.types.admin import AdminCall, AdminResult
from medialane.types.errors import (
    GenerationFailed,
    InvalidRequest,
    PromptRejected,
    StartupFailed,
    WorkerBusy,
    WorkerLost,
)
from medialane.types.feature import EmbeddingUse
from medialane.types.kv_blocks import KvEventBatch
from medialane.types.request import (
    CompletionDelta,
    EmbeddingCounts,
    EngineRequest,
    EngineTimes,
    ExpandedPrompt,
    ModelCard,
    OutputDelta,
    WorkerLoad,
    WorkerRole,
)
from medialane.wire.address import TcpAddress, consecutive_ports, parse_address
from medialane.wire.config import RpcConfig
from medialane.wire.protocol import Hello, Welcome
from medialane.worker.config import WorkerConfig
from medialane.worker.media import HostArena
from medialane.worker.serve import default_name, serve_until
from medialane.worker.worker import Worker

logger = logging.getLogger(__name__)

#: vLLM's RequestOutputKind.
_CUMULATIVE, _FINAL_ONLY = 0, 2
_MIB = 1 << 20


def simulated_card(config: SimulatedConfig, model: str, role: WorkerRole = "worker") -> ModelCard:
    """Return the model card of a simulated worker; it has no processor, so no processor settings."""
    return ModelCard(
        model=model,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        processor={},
        encoder_cache_tokens=config.encoder_cache_tokens,
        num_kv_blocks=config.num_kv_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        role=role,
        kv_group="" if role == "worker" else "simulated",
    )


def step_s(config: SimulatedConfig, step: SimulatedStep) -> float:
    """Return the duration of a step, in simulated seconds."""
    ms = (
        config.step_ms
        + config.prefill_token_ms * step.num_prefill_tokens
        + config.prefill_pair_ns * 1e-6 * step.num_prefill_pairs
        + config.decode_token_ms * step.num_decode_tokens
        + config.embedding_ms * step.num_embeds
        + config.load_ms_per_mib * step.num_loaded_embeds * config.embedding_bytes / _MIB
    )
    return ms * 1e-3


def simulated_scheduler(config: SimulatedConfig, *, mask: int = 0) -> Scheduler:
    """Create a scheduler with empty caches and queues. `mask`: see `BlockPool`."""
    return Scheduler(
        BlockPool(config.num_kv_blocks, mask=mask),
        EncoderCache(config.encoder_cache_tokens),
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        # Like vLLM's: at least the largest item, which may fill the cache.
        max_encoder_tokens=max(config.max_num_batched_tokens, config.encoder_cache_tokens),
    )


class _Output:
    """The outputs of one request's choices; `num_unfinished` of them go on."""

    def __init__(self, request_id: str, num_choices: int) -> None:
        self.request_id = request_id
        self.num_unfinished = num_choices
        self.choices: list[CompletionDelta] = []
        self.deltas: asyncio.Queue[OutputDelta | None] = asyncio.Queue()


class _Choice:
    """One choice of a request."""

    def __init__(self, output: _Output, index: int, sequence: SimulatedSequence, params: SimulatedParams) -> None:
        self.output = output
        self._index = index
        self._sequence = sequence
        self._output_kind = params.output_kind
        self._detokenizes = params.detokenize
        self._num_sent = 0

    def gained(self, stream_interval: int, texts: Mapping[int, str], now: float) -> None:
        """Queue a delta for a new token, unless it has to wait for further ones."""
        sequence = self._sequence
        total = len(sequence.token_ids) - sequence.num_prompt_tokens
        waits = self._num_sent > 0 and total - self._num_sent < stream_interval
        if sequence.finished:
            self.output.num_unfinished -= 1
        if sequence.finished or not (waits or self._output_kind == _FINAL_ONLY):
            self._send(self._delta(texts, now))
            self._num_sent = total

    def _send(self, delta: OutputDelta) -> None:
        """The final output of a request has all of its choices, as vLLM's."""
        if self._output_kind == _FINAL_ONLY:
            self.output.choices += delta.completions
            if not delta.finished:
                return
            choices = sorted(self.output.choices, key=lambda choice: choice.index)
            delta = msgspec.structs.replace(delta, completions=choices)
        self.output.deltas.put_nowait(delta)

    def _delta(self, texts: Mapping[int, str], now: float) -> OutputDelta:
        sequence, first = self._sequence, self._num_sent == 0
        start = self._num_sent if self._output_kind not in (_CUMULATIVE, _FINAL_ONLY) else 0
        tokens = sequence.token_ids[sequence.num_prompt_tokens + start :]
        shown = tokens[: None if sequence.stop_reason is None else -1] if self._detokenizes else []
        text = "".join([texts.get(token) or f"<{token}>" for token in shown])
        reason = None if not sequence.finished else "length" if sequence.stop_reason is None else "stop"
        return OutputDelta(
            self.output.request_id,
            [CompletionDelta(self._index, text, tokens, finish_reason=reason, stop_reason=sequence.stop_reason)],
            finished=not self.output.num_unfinished,
            num_cached_tokens=sequence.num_cached_tokens,
            num_transferred_tokens=sequence.num_transferred if first else 0,
            times=self._times(now) if first else None,
        )

    def _times(self, now: float) -> EngineTimes:
        sequence = self._sequence
        return EngineTimes(
            queue_s=max(0.0, sequence.scheduled_s - sequence.queued_s),
            prefill_s=max(0.0, sequence.first_token_s - sequence.scheduled_s),
            decode_s=now - sequence.first_token_s,
        )


class SimulatedEngine:
    """An engine without a model, for tests of scale and routing. Output tokens: `AnswerTokens`.

    `EngineTimes` are in simulated seconds. Steps run in a task that exists while there is work.
    """

    def __init__(self, config: SimulatedConfig, *, model: str, role: WorkerRole = "worker") -> None:
        """`model` is the card's; if it is a folder, tokens are decoded with its vocabulary."""
        self.card = simulated_card(config, model, role)
        self._config = config
        self._scheduler = simulated_scheduler(config, mask=secrets.randbits(64))
        self._texts = token_texts(model)
        self._choices: dict[SimulatedSequence, _Choice] = {}
        self._listener: Callable[[KvEventBatch], None] | None = None
        self._stepping: asyncio.Task[None] | None = None
        self._failed = self._closed = False

    @property
    def embedding_counts(self) -> EmbeddingCounts:
        return EmbeddingCounts()

    def loads(self) -> list[WorkerLoad]:
        scheduler = self._scheduler
        return [WorkerLoad(len(scheduler.running), len(scheduler.waiting), scheduler.pool.usage)]

    def watch_blocks(self, listener: Callable[[KvEventBatch], None]) -> None:
        self._listener = listener

    async def attach_arena(self, arena: str, nonce: bytes) -> bool:
        return True  # there is no other process, and tensors are not read

    async def detach_arena(self, arena: str) -> None:
        """There is nothing to unmap."""

    async def generate(
        self,
        request: EngineRequest,
        tensors: Sequence[Sequence[memoryview]],
        embeddings: Sequence[EmbeddingUse | None] = (),
    ) -> AsyncGenerator[OutputDelta, None]:
        self._check_alive()
        transfer = request.kv_transfer
        if transfer is not None and transfer.step == "release":
            yield OutputDelta(request.request_id, [], finished=True)
            return
        params = _params(request)
        sequences = [self._sequence(request, embeddings, params.of_choice(index)) for index in range(params.n)]
        self._check_admission(len(sequences))
        if transfer is not None and transfer.step == "receive":
            await self._receive(sequences)
        output = _Output(request.request_id, len(sequences))
        for index, sequence in enumerate(sequences):
            self._choices[sequence] = _Choice(output, index, sequence, params)
            sequence.queued_s = self._now()
            self._scheduler.add(sequence)
        self._keep_stepping()
        try:
            while (delta := await output.deltas.get()) is not None:
                is_sent = transfer is not None and transfer.step == "send"
                yield msgspec.structs.replace(delta, kv_params=b"{}") if is_sent else delta
                if delta.finished:
                    return
            raise WorkerLost("the worker's engine has stopped")
        finally:
            for sequence in sequences:
                del self._choices[sequence]
                self._scheduler.remove(sequence)

    async def _receive(self, sequences: Sequence[SimulatedSequence]) -> None:
        """Wait until the blocks of the prompts are read, all but their last token."""
        for sequence in sequences:
            sequence.num_received = sequence.num_prompt_tokens - 1
            ms = sequence.num_received * self._config.transfer_token_ms
            await asyncio.sleep(ms * 1e-3 / self._config.speedup)

    async def administer(self, call: AdminCall) -> AdminResult:
        raise InvalidRequest(f"a simulated engine does not support {type(call).__name__}")

    async def ping(self, timeout_s: float) -> None:
        self._check_alive()

    async def used_cpu_s(self) -> float | None:
        return time.process_time()

    async def close(self) -> None:
        self._closed = True
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)
        self._fail_all()

    def reset_prefix_cache(self) -> bool:
        """Drop all content of the KV cache; return False while a request uses it. Like vLLM's method of this name."""
        done = self._scheduler.pool.clear()
        self._publish_blocks()
        return done

    def _now(self) -> float:
        """Return the simulated time, in seconds from an arbitrary origin."""
        return time.monotonic() * self._config.speedup

    def _keep_stepping(self) -> None:
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._run_steps(), name="simulated steps")

    async def _run_steps(self) -> None:
        try:
            await self._steps()
        except Exception as error:  # top level of the task: any failure stops the engine, and `ping` reports it
            logger.critical("the simulated engine has failed", exc_info=error)
            self._failed = True
            self._fail_all()

    async def _steps(self) -> None:
        """Run steps while there is work. Each ends its duration after the scheduled end of the previous one."""
        due = self._now()
        while (step := self._scheduler.step()).tokens:
            for sequence in step.tokens:
                if not sequence.scheduled_s:
                    sequence.scheduled_s = due
            due += step_s(self._config, step)
            await asyncio.sleep(max(0.0, due - self._now()) / self._config.speedup)
            self._complete(step, due)

    def _complete(self, step: SimulatedStep, now: float) -> None:
        gained = self._scheduler.complete(step)
        self._publish_blocks()
        for sequence in gained:
            if not sequence.first_token_s:
                sequence.first_token_s = now
            choice = self._choices.get(sequence)
            if choice is not None:
                choice.gained(self._config.stream_interval, self._texts, now)

    def _publish_blocks(self) -> None:
        events = self._scheduler.take_events()
        if events and self._listener is not None:
            self._listener(KvEventBatch(0, events, time.time()))

    def _fail_all(self) -> None:
        for choice in self._choices.values():
            choice.output.deltas.put_nowait(None)

    def _check_alive(self) -> None:
        if self._failed or self._closed:
            raise WorkerLost("the worker's engine has stopped")

    def _check_admission(self, num_choices: int) -> None:
        """Raise WorkerBusy where vLLM's method of this name raises its errors: a request's prompt counts until its
        first token, whatever of it is cached or computed already."""
        config = self._config
        if config.max_queued_reqs and len(self._choices) + num_choices > config.max_queued_reqs:
            raise WorkerBusy("the engine's queue is full")
        in_prefill = [sequence for sequence in self._choices if not sequence.first_token_s]
        num_tokens = sum(sequence.num_prompt_tokens for sequence in in_prefill)
        if config.max_queued_tokens and num_tokens >= config.max_queued_tokens:
            raise WorkerBusy("the engine's queue has too many tokens")

    def _sequence(
        self, request: EngineRequest, embeddings: Sequence[EmbeddingUse | None], params: SimulatedParams
    ) -> SimulatedSequence:
        prompt = request.prompt
        if not isinstance(prompt, ExpandedPrompt):
            raise GenerationFailed("a simulated worker has no processor: it supports only features")
        num_tokens = len(prompt.token_ids) + len(request.generated)
        num_free = self.card.max_model_len - num_tokens
        if not prompt.token_ids:
            raise PromptRejected("the prompt is empty")
        if num_free <= 0:
            raise PromptRejected(f"{num_tokens} prompt tokens exceed max_model_len {self.card.max_model_len}")
        max_tokens = min(num_free, params.max_tokens or num_free)
        sequence = sequence_of(
            request, embeddings, block_size=self.card.block_size, params=params, max_tokens=max_tokens
        )
        if any(item.placeholder.num_embeds > self._config.encoder_cache_tokens for item in sequence.items):
            raise PromptRejected("a media item has more tokens than the encoder cache holds")
        return sequence


def _params(request: EngineRequest) -> SimulatedParams:
    try:
        params = msgspec.msgpack.decode(request.sampling_params, type=SimulatedParams)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PromptRejected("malformed sampling parameters") from error
    if params.n < 1:
        raise PromptRejected("n must be positive")
    if request.kv_transfer is not None and request.kv_transfer.step == "send":
        return SimulatedParams(max_tokens=1, output_kind=_FINAL_ONLY, seed=params.seed)
    return params


#: Placeholder of the worker's number in an address.
NUMBER = "{}"


class SimulatedWorker(Worker):
    """A worker that is compatible with any gateway's features, since its engine never reads them."""

    async def register(self, hello: Hello) -> Welcome:
        """Like `Worker.register`, with the gateway's processor settings in our card."""
        welcome = await super().register(msgspec.structs.replace(hello, processor={}))
        card = msgspec.structs.replace(welcome.card, processor=hello.processor)
        return msgspec.structs.replace(welcome, card=card)


async def serve_simulated(
    config: SimulatedConfig,
    worker: WorkerConfig,
    rpc: RpcConfig,
    *,
    model: str,
    listen: str | None,
    arena_directory: str,
    role: WorkerRole = "worker",
    host_arena: HostArena | None = None,
    gateways: Sequence[TcpAddress] = (),
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
) -> int:
    """Serve `config.num_workers` workers of `model` until SIGTERM or SIGINT (0), or until one fails (EXIT_ENGINE_LOST).

    Raises StartupFailed if it cannot listen at an address.
    """
    memory = MemoryUse(lambda: {"worker": [os.getpid()]})
    addresses = [None] * config.num_workers if listen is None else addresses_of(listen, config.num_workers)
    with stopped_by_signals() as stop:

        async def serve_one(number: int, address: str | None) -> int:
            settings = _of_worker(worker, number) if number else worker
            engine = SimulatedEngine(config, model=model, role=role)
            serving = SimulatedWorker(
                engine,
                settings,
                arena_directory=arena_directory,
                host_arena=host_arena,
                memory=dict if number else memory.read,  # one process: counted once
            )
            try:
                return await serve_until(
                    stop,
                    serving,
                    engine,
                    address,
                    config=settings,
                    rpc=rpc,
                    gateways=gateways,
                    drain_timeout_s=drain_timeout_s,
                )
            finally:
                stop.asked.set()  # one end stops all: the process exits and can be restarted

        try:
            async with asyncio.TaskGroup() as tasks:
                serving = [tasks.create_task(serve_one(i, address)) for i, address in enumerate(addresses)]
        except* StartupFailed as group:
            raise group.exceptions[0] from None
    return max(task.result() for task in serving)


def _of_worker(config: WorkerConfig, number: int) -> WorkerConfig:
    """Return the settings of a further worker of this process: a name and a port of its own."""
    name = f"{config.name or default_name(config)}/{number}"
    port = config.metrics_port + number if config.metrics_port else 0
    return msgspec.structs.replace(config, name=name, metrics_port=port)


def addresses_of(listen: str, num_workers: int) -> list[str]:
    """Return the address of each worker: `{}` is replaced by its number, or ports count up. Raises StartupFailed."""
    target = parse_address(listen.replace(NUMBER, "0"), "--listen")
    if num_workers == 1 or NUMBER in listen:
        return [listen.replace(NUMBER, str(number)) for number in range(num_workers)]
    if isinstance(target, TcpAddress):
        return consecutive_ports(listen, num_workers, "--listen")
    raise StartupFailed("several workers need different addresses: use {} for the worker's number in --listen")
