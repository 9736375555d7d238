"""vLLM's AsyncLLM as a worker's engine (implements `worker.Engine`).

Theory of operation. A request's features arrive as views of an arena or of the message, and are fully validated before
they are passed to vLLM (`validation`). vLLM's front end, in this process, sends the request to its EngineCore process;
an item whose tensors are in arenas that EngineCore has mapped is sent as a descriptor (`arena_tensors`).

*Release.* The caller may reuse a request's bytes once `generate` has returned, so it must not return while EngineCore
may read them. If EngineCore itself finished the request, it no longer does. After an abort or a stop string, which only
the front end detects, EngineCore still runs the request: we send utility calls through the same queue, each executed
between two steps, until every step that was in progress has completed. If they do not return within
`release_timeout_s`, the state is unknown: `generate` does not return, `ping` reports the engine as lost, and the exit
of the process releases everything.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import msgspec
from vllm import envs
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from medialane.runtime.phase import enter_phase
from medialane.runtime.resources import used_cpu_s
from medialane.types.admin import AdminCall, AdminResult, changes_encoder
from medialane.types.errors import (
    GenerationFailed,
    HandoverFailed,
    MedialaneError,
    StartupFailed,
    WorkerLost,
)
from medialane.types.feature import EmbeddingUse
from medialane.types.kv_blocks import KvEventBatch
from medialane.types.request import (
    ENCODER,
    EmbeddingCounts,
    EncodeCache,
    EngineRequest,
    KvTransfer,
    ModelCard,
    OutputDelta,
    UnexpandedPrompt,
    WorkerLoad,
    WorkerRole,
)
from medialane.vllm_bridge.engine.adapters import ACTIONS, ADAPTER_ACTIONS, Adapters, plain_name
from medialane.vllm_bridge.engine.engine_embeddings import EngineEmbeddings, accepted_embeds
from medialane.vllm_bridge.engine.engine_options import check_prefix_cache, engine_args
from medialane.vllm_bridge.engine.engine_request import (
    RequestReader,
    clamp,
    has_arena_items,
    placed_media,
    prompt_token_ids,
)
from medialane.vllm_bridge.engine.kv_events import KvEventReader
from medialane.vllm_bridge.engine.kv_transfer import (
    Transfers,
    check_transfer,
    choose_address,
    encode_params,
    kv_group,
    read_params,
)
from medialane.vllm_bridge.engine.outputs import check_grammar, ended_by_front_end, has_error, to_deltas
from medialane.vllm_bridge.engine.plugin import PrivateFolder, register, show_vllm_lines
from medialane.vllm_bridge.engine_errors import REQUEST_ERRORS, mapped_errors
from medialane.vllm_bridge.items.arena_tensors import ArenaEncoder
from medialane.vllm_bridge.learned.model_profile import ModelProfile
from medialane.vllm_bridge.learned.settings import processor_settings
from medialane.vllm_bridge.seams.cpu import engines_forked_ahead
from medialane.vllm_bridge.seams.encoder_cache import may_span_hosts
from medialane.vllm_bridge.seams.engine import (
    SchedulerStats,
    call_every_engine,
    encode_with,
    encoder_cache_tokens,
    is_engine_dead,
    num_unfinished_by_rank,
    stop_listening,
    watch_transfers,
)
from medialane.vllm_bridge.seams.multimodal import limit_sampled_frames, processor_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Interval at which a wait for EngineCore checks that it is alive: a dead one never replies.
ALIVE_CHECK_S = 0.2

#: Less than a gateway's registration timeout; an engine that is busy for longer maps the arena at the next attempt.
ATTACH_TIMEOUT_S = 20.0

#: Covers an adapter that is read from disk or downloaded.
ADAPTER_TIMEOUT_S = 120.0


def build_engine(
    model: str,
    vllm_args: Sequence[str],
    *,
    arena_directory: str = "/dev/shm",  # noqa: S108 - where ArenaConfig puts arenas
    release_timeout_s: float = 60.0,
    max_sampled_frames: int = 768,
    encode_cache: EncodeCache = "auto",
    role: WorkerRole = "worker",
    host: str = "",
) -> VllmEngine:
    """Start vLLM in this process and its children. Blocks for tens of seconds; call it before serving.

    `vllm_args` are vLLM's own flags. `release_timeout_s` limits the wait until EngineCore has released an aborted
    request, `max_sampled_frames` the frames of a video that is decoded here. `encode_cache` is whether embeddings are
    kept; `learn_encoder` completes the card then. With the role `encoder` the engine has no language model, with
    `prefill` or `decode` a connector for KV blocks; other hosts reach this one as `host`. Raises StartupFailed. The
    caller owns the engine and closes it.
    """
    folder = PrivateFolder()
    try:
        enter_phase("reading the model's configuration")
        show_vllm_lines()
        folder.enter()
        events = KvEventReader(folder.path)
        args = engine_args(model, vllm_args, kv_events=events.config, role=role)
        choose_address(args, host)
        register()  # vLLM calls it only once in a process, perhaps in one from which this one was forked
        limit_sampled_frames(max_sampled_frames)
        recorder = LoadRecorder()
        usage = UsageContext.OPENAI_API_SERVER
        with engines_forked_ahead(args):
            config = args.create_engine_config(usage)
            show_vllm_lines(config.logging_config.log_level)
            check_prefix_cache(config)
            check_transfer(config, role)
            embeddings = EngineEmbeddings(config, encode_cache, arena_directory=arena_directory, role=role)
            enter_phase("starting the engine")
            llm = AsyncLLM.from_vllm_config(
                config,
                usage_context=usage,
                stat_loggers=[recorder.factory],
                enable_log_requests=args.enable_log_requests,
                disable_log_stats=args.disable_log_stats,
            )
    except BaseException as error:  # cancellation included: the folder has no other owner
        folder.remove()
        if isinstance(error, OSError | RuntimeError | ValueError):
            raise StartupFailed(f"vLLM failed to start: {error}") from error
        raise
    return VllmEngine(
        llm,
        recorder,
        events,
        folder,
        embeddings=embeddings,
        arena_directory=arena_directory,
        release_timeout_s=release_timeout_s,
        role=role,
    )


class LoadRecorder:
    """The latest statistics of each rank's scheduler, which vLLM passes to its stat loggers after every step."""

    def __init__(self) -> None:
        self._loggers: dict[int, _RankRecorder] = {}

    def loads(self, num_unfinished: Sequence[int]) -> list[WorkerLoad]:
        """Return the load of each rank, in order, given its number of unfinished requests."""
        latest = [logger.stats for _, logger in sorted(self._loggers.items())]
        if not latest:  # with --disable-log-stats: nothing says what waits, so gateways must not wait for it to begin
            return [WorkerLoad(total) for total in num_unfinished]
        return [_load(total, stats) for total, stats in zip(num_unfinished, latest, strict=True)]

    def factory(self, config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """Create the logger of one rank; vLLM calls this once per rank."""
        return self._loggers.setdefault(engine_index, _RankRecorder(config))


class _RankRecorder(StatLoggerBase):  # type: ignore[misc]  # vllm is not typed
    def __init__(self, _config: VllmConfig) -> None:
        self.stats = SchedulerStats()

    def record(self, scheduler_stats: SchedulerStats | None, *_args: Any, **_kwargs: Any) -> None:
        if scheduler_stats is not None:  # vLLM's own loggers come after this one
            for counts in (scheduler_stats.waiting_lora_adapters, scheduler_stats.running_lora_adapters):
                _name_plainly(counts)
        self.stats = scheduler_stats or self.stats

    def log_engine_initialized(self) -> None:
        """vLLM's own loggers log it."""


def _name_plainly(counts: dict[str, int]) -> None:
    """Sum up the versions of each adapter, under the name by which clients and routers know it."""
    for name, count in list(counts.items()):
        del counts[name]
        counts[plain_name(name)] = counts.get(plain_name(name), 0) + count


def _load(num_unfinished: int, stats: SchedulerStats) -> WorkerLoad:
    running = min(num_unfinished, stats.num_running_reqs)
    return WorkerLoad(running, num_unfinished - running, stats.kv_cache_usage if num_unfinished else 0.0)


class VllmEngine:
    """One AsyncLLM, `llm`, whose KV events `events` reads. Made by `build_engine`."""

    def __init__(
        self,
        llm: AsyncLLM,
        recorder: LoadRecorder,
        events: KvEventReader,
        folder: PrivateFolder,
        *,
        embeddings: EngineEmbeddings,
        arena_directory: str,
        release_timeout_s: float,
        role: WorkerRole = "worker",
    ) -> None:
        self.llm = llm
        self._recorder = recorder
        self.events = events
        self._folder = folder
        self._embeddings = embeddings
        self._arena_directory = arena_directory
        self._release_timeout_s = release_timeout_s
        self._num_releases_unknown = 0
        self._logged_at = time.monotonic()
        self._closed = False
        self._lifetime_bound = False
        self._arenas: set[str] = set()
        encode_with(llm, ArenaEncoder)
        profile = ModelProfile(processor_of(llm.renderer)) if self.takes_media else None
        self._reader = RequestReader(llm, profile, self._arenas, embeddings)
        self._adapters = Adapters(
            folder.path,
            load=self._load_adapter,
            remove=lambda number: self._ask("remove_lora", number, timeout_s=ADAPTER_TIMEOUT_S),
            reads_path=may_span_hosts(llm.vllm_config),
        )
        self.card = _card(llm, profile, role)
        self._transfers = Transfers()
        if self.card.kv_group:
            watch_transfers(llm, self._transfers.begun, self._transfers.note_kept)

    @property
    def takes_media(self) -> bool:
        """Whether the model takes media, as it is configured."""
        return bool(self.llm.model_config.supports_multimodal_inputs)

    @property
    def embedding_counts(self) -> EmbeddingCounts:
        """Totals as of the last `ping`."""
        return self._embeddings.counts

    async def learn_encoder(self) -> None:
        """Complete the card: what the encoder's embeddings look like, if they are kept; the tasks of a pooling model.

        To be awaited once, before the card is sent to anyone. Raises StartupFailed, with the engine closed, if
        embeddings must be kept and cannot be; WorkerLost.
        """
        try:
            await self._embeddings.learn(self._ask)
        except StartupFailed:
            await self.close()
            raise
        if self.llm.model_config.runner_type == "pooling":
            tasks = tuple(await self._result_or_death(self.llm.get_supported_tasks()))
            self.card = msgspec.structs.replace(self.card, tasks=tasks)
        self._renew_card()
        accepted = await accepted_embeds(self.llm.model_config, self._ask)
        if accepted is not None:
            self._reader.renderer.accept_embeds(accepted)

    def loads(self) -> list[WorkerLoad]:
        """Return the load of each rank: unfinished requests as of now, running ones as of the last step (an idle engine
        runs no steps)."""
        if self.card.data_parallel_size == 1:
            counts = [self.llm.get_num_unfinished_requests()]
        else:
            counts = num_unfinished_by_rank(self.llm)
        return self._recorder.loads(counts)

    def watch_blocks(self, listener: Callable[[KvEventBatch], None]) -> None:
        self.events.start(self.llm.get_kv_event_sources(), listener)

    async def attach_arena(self, arena: str, nonce: bytes) -> bool:
        try:
            mapped = await self._ask(
                "medialane_attach", arena, self._arena_directory, nonce.hex(), timeout_s=ATTACH_TIMEOUT_S
            )
        except GenerationFailed as error:
            logger.warning("EngineCore cannot map arenas (VLLM_PLUGINS?), features are copied: %s", error.message)
            return False
        if all(mapped):
            self._arenas.add(arena)
            with self._warned("the engine's processes have not mapped an arena"):
                await self._embeddings.attach(self._ask, arena, nonce)
        return all(mapped)

    async def detach_arena(self, arena: str) -> None:
        self._arenas.discard(arena)  # perhaps absent: EngineCore also maps it if `attach_arena` has timed out
        with self._warned("EngineCore has not confirmed that it has unmapped an arena"):
            await self._ask("medialane_detach", arena, timeout_s=ATTACH_TIMEOUT_S)
            await self._embeddings.detach(self._ask, arena)

    def generate(
        self,
        request: EngineRequest,
        tensors: Sequence[Sequence[memoryview]],
        embeddings: Sequence[EmbeddingUse | None] = (),
    ) -> AsyncGenerator[OutputDelta, None]:
        deltas = self._generate(request, tensors, embeddings)
        return deltas if request.kv_transfer is None else self._leaving_no_blocks(request, request.kv_transfer, deltas)

    async def _generate(
        self,
        request: EngineRequest,
        tensors: Sequence[Sequence[memoryview]],
        embeddings: Sequence[EmbeddingUse | None],
    ) -> AsyncGenerator[OutputDelta, None]:
        transfer = request.kv_transfer
        with mapped_errors():
            if transfer is not None and transfer.step == "release":
                await self._release_blocks(request.request_id, transfer)
                yield OutputDelta(request.request_id, [], finished=True)
                return
            if transfer is not None and transfer.step == "receive" and self._reader.params(request).n > 1:
                request = await self._with_fetched_blocks(request, transfer, tensors, embeddings)
            sent = self._reader.embeddings(request, embeddings)
            engine_input = await self._reader.engine_input(request, tensors, embeddings)
            # The decoder's prompt of a model that has an encoder's is known to the gateway.
            expanded_here = isinstance(request.prompt, UnexpandedPrompt) and request.prompt.encoder_token_ids is None
            expanded = prompt_token_ids(engine_input, request) if expanded_here else None
            placed = placed_media(engine_input) if expanded_here else []
            reads_arena = sent is not None or has_arena_items(engine_input)  # vLLM takes items out of its input
            named = self._reader.named_for_engine(engine_input)
            async with (
                self._transfers.in_time(request.request_id, transfer),
                self._adapters.using(self._reader.lora(request), exact=bool(request.generated)) as lora,
                aclosing(self._outputs(request, named, sent, lora)) as outputs,
            ):
                first = True
                if transfer is not None:
                    self._transfers.kept[request.request_id] = b""
                async for output in outputs:
                    if has_error(output):
                        await self._check_cause(request, output, reads_arena=reads_arena, first=first)
                    for delta in to_deltas(output, first=first, expanded=expanded, placed=placed):
                        yield delta if transfer is None else self._with_transfer(delta, output, transfer)
                    first = False

    async def _leaving_no_blocks(
        self, request: EngineRequest, transfer: KvTransfer, deltas: AsyncGenerator[OutputDelta, None]
    ) -> AsyncGenerator[OutputDelta, None]:
        """Stream the output. An abort may come before EngineCore has got the request, whose connector would otherwise
        say that it reads no blocks; or cross the output of a prompt whose blocks are kept, which vLLM then drops."""
        has_output = False
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    has_output = True
                    yield delta
        except asyncio.CancelledError:
            kept = self._transfers.kept.get(request.request_id)
            if kept and not has_output:
                yield OutputDelta(request.request_id, [], finished=True, kv_params=kept)
            elif kept is None and transfer.params and not has_output:
                await self._release_blocks(request.request_id, transfer)
            raise
        finally:
            self._transfers.kept.pop(request.request_id, None)

    async def _release_blocks(self, request_id: str, transfer: KvTransfer) -> None:
        """Have the connector tell another engine that blocks, which it keeps for this one, are not read."""
        params = read_params(transfer.params, self.llm.vllm_config.kv_transfer_config)
        if params is not None:
            await self.llm.notify_kv_transfer_request_rejected(request_id, params)

    async def _with_fetched_blocks(
        self,
        request: EngineRequest,
        transfer: KvTransfer,
        tensors: Sequence[Sequence[memoryview]],
        embeddings: Sequence[EmbeddingUse | None],
    ) -> EngineRequest:
        """Return a request for several choices without parameters of KV blocks: each choice would read the blocks,
        which are kept for one reader. They are read into the prefix cache before, if there is one."""
        self._transfers.kept[request.request_id] = b""  # it leaves them to `fetch`
        if transfer.params and self.card.block_size:
            fetch = msgspec.structs.replace(
                request, request_id=f"{request.request_id}-kv", kv_transfer=KvTransfer("fetch", transfer.params)
            )
            async with aclosing(self.generate(fetch, tensors, embeddings)) as deltas:
                async for delta in deltas:
                    self._transfers.begun(request.request_id, delta.num_transferred_tokens)
        elif transfer.params:
            await self._release_blocks(request.request_id, transfer)
        return msgspec.structs.replace(request, kv_transfer=KvTransfer("receive"))

    def _with_transfer(self, delta: OutputDelta, output: RequestOutput, transfer: KvTransfer) -> OutputDelta:
        """Return the output with what it says about KV blocks of other engines."""
        if transfer.step == "send":
            return msgspec.structs.replace(delta, kv_params=encode_params(output.kv_transfer_params))
        num_tokens = self._transfers.take(delta.request_id)
        return msgspec.structs.replace(delta, num_transferred_tokens=num_tokens) if num_tokens else delta

    async def administer(self, call: AdminCall) -> AdminResult:
        with mapped_errors():
            async with self._new_encoder_after(call):
                try:
                    if (action := ADAPTER_ACTIONS.get(type(call))) is not None:
                        return await action(self._adapters, call)
                    result = await self._result_or_death(ACTIONS[type(call)](self.llm, call))
                except (*REQUEST_ERRORS, EngineDeadError, MedialaneError):
                    raise
                except Exception as error:  # vLLM has no narrower type for a failed utility
                    raise GenerationFailed(str(error) or type(error).__name__) from error
        return None if result is None else bool(result)

    async def ping(self, timeout_s: float) -> None:
        if self.llm.errored or self._num_releases_unknown:
            raise WorkerLost("the worker's engine has died")
        await self._ask("is_sleeping", timeout_s=timeout_s)
        await self._embeddings.refresh(self._ask, timeout_s=timeout_s)
        await self._log_stats()
        if not self._lifetime_bound:
            self._lifetime_bound = True
            await self._bind_lifetime(timeout_s)

    async def used_cpu_s(self) -> float | None:
        pids = [process.pid for process in multiprocessing.active_children() if process.pid is not None]
        return await asyncio.to_thread(used_cpu_s, pids)

    async def close(self) -> None:
        """Stop EngineCore and its children. Idempotent."""
        if not self._closed:
            self._closed = True
            self._reader.renderer.close()
            await self.events.close()
            stop_listening(self.llm)
            await asyncio.get_running_loop().run_in_executor(None, self.llm.shutdown)
            self._folder.remove()

    async def _outputs(
        self, request: EngineRequest, engine_input: Any, embeddings: bytes | None, lora: LoRARequest | None
    ) -> AsyncGenerator[RequestOutput | PoolingRequestOutput, None]:
        """Yield vLLM's outputs. Returns only after EngineCore has released the request."""
        arguments = self._reader.arguments(request)
        if request.is_pooling:
            run, params = self.llm.encode, self._reader.pooling_params(request)
        else:
            run, params = self.llm.generate, self._reader.params(request, embeddings)
            clamp(params, engine_input, self.card.max_model_len)
        generating = run(engine_input, params, request.request_id, lora_request=lora, **arguments)
        cut_short = settled = False
        try:
            async with aclosing(generating):
                async for output in generating:
                    cut_short = cut_short or ended_by_front_end(output)
                    settled = output.finished and not cut_short
                    yield output
        except REQUEST_ERRORS:
            settled = True
            raise
        finally:
            self._transfers.take(request.request_id)
            if not settled:
                await self._wait_released(request.request_id)

    @asynccontextmanager
    async def _new_encoder_after(self, call: AdminCall) -> AsyncIterator[None]:
        """If the call may change weights: have the card announce another encoder, and save no embeddings of requests
        that began before its end."""
        if not changes_encoder(call):
            yield
            return
        self._embeddings.renew(call.salt)
        self._renew_card()
        await self._embeddings.drop_fills(self._ask)
        yield
        await self._embeddings.drop_fills(self._ask)

    def _renew_card(self) -> None:
        kept = self._embeddings
        self.card = msgspec.structs.replace(self.card, encoder=kept.card, no_embeddings=kept.reason)

    @contextmanager
    def _warned(self, what: str) -> Iterator[None]:
        """Log a failed call of a utility."""
        try:
            yield
        except GenerationFailed as error:
            logger.warning("%s: %s", what, error.message)

    async def _wait_released(self, request_id: str) -> None:
        """Return when EngineCore no longer reads an aborted request's data; see the theory of operation."""
        # A step may be running for each pipeline stage, one more with asynchronous scheduling; and the abort after a
        # stop string may be sent after the first call.
        num_calls = 2 + self.llm.vllm_config.parallel_config.pipeline_parallel_size
        try:
            for _ in range(num_calls):
                await self._ask("is_sleeping", timeout_s=self._release_timeout_s)
        except (GenerationFailed, WorkerLost):
            if is_engine_dead(self.llm):
                return  # a dead process reads nothing
            self._num_releases_unknown += 1
            logger.critical("request %s: the engine has not confirmed its release", request_id)
            await asyncio.Event().wait()  # until the process exits, which `ping` brings about

    async def _ask(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a utility of every EngineCore and return the results. Raises WorkerLost if EngineCore dies,
        GenerationFailed if the timeout expires or the utility fails."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._result_or_death(call_every_engine(self.llm, method, *args))
        except TimeoutError as error:
            raise GenerationFailed(f"the engine did not respond within {timeout_s:g} s") from error
        except EngineDeadError as error:
            raise WorkerLost("the worker's engine has died") from error
        except MedialaneError:
            raise
        except Exception as error:  # vLLM has no narrower type for a failed utility
            raise GenerationFailed(f"the engine failed a call of {method}") from error

    async def _result_or_death(self, call: Awaitable[T]) -> T:
        """Return the call's result. Raises WorkerLost if EngineCore dies, which then never replies."""
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                if self.llm.errored:
                    raise WorkerLost("the worker's engine has died")
                await asyncio.wait({task}, timeout=ALIVE_CHECK_S)
            return task.result()
        finally:
            task.cancel()

    async def _log_stats(self) -> None:
        """Log at the interval of vLLM's own server: some of its loggers accumulate every step until they log."""
        now = time.monotonic()
        if now - self._logged_at >= envs.VLLM_LOG_STATS_INTERVAL:
            self._logged_at = now
            await self.llm.do_log_stats()

    async def _load_adapter(self, lora: LoRARequest) -> None:
        try:
            await self._ask("add_lora", lora, timeout_s=ADAPTER_TIMEOUT_S)
        except GenerationFailed as error:
            raise GenerationFailed(str(error.__cause__) or error.message) from error

    async def _bind_lifetime(self, timeout_s: float) -> None:
        """Make every EngineCore exit when this process does, even if it is killed."""
        try:
            bound = all(await self._ask("medialane_die_with", os.getpid(), timeout_s=timeout_s))
        except GenerationFailed:
            bound = False
        if not bound:
            logger.warning("the engine's processes may survive if this process is killed")

    async def _check_cause(
        self, request: EngineRequest, output: RequestOutput | PoolingRequestOutput, *, reads_arena: bool, first: bool
    ) -> None:
        """EngineCore says only that a request has failed. Raise HandoverFailed if it could not read its items (once its
        answer has begun WorkerLost: it may go on elsewhere), and InvalidGrammar if it could not compile its grammar, or
        no first token satisfied that: vLLM's front end has only parsed it."""
        if reads_arena and any(
            await self._ask("medialane_refused", request.request_id, timeout_s=self._release_timeout_s)
        ):
            why = "the engine could not read the items of the request"
            raise HandoverFailed(why) if first else WorkerLost(why)
        if first and request.kv_transfer is not None:  # if it is something else, it fails again
            raise HandoverFailed("the engine has failed a request with KV blocks of another one")
        connector = self.llm.vllm_config.kv_transfer_config
        may_be_grammar = connector is None or connector.kv_load_failure_policy == "recompute"  # others fail requests
        if first and may_be_grammar and isinstance(output, RequestOutput):
            check_grammar(output, self._reader.params(request))


def _card(llm: AsyncLLM, profile: ModelProfile | None, role: WorkerRole) -> ModelCard:
    config = llm.vllm_config
    # An encoder publishes no KV events.
    num_ranks = len(llm.get_kv_event_sources()) or config.parallel_config.data_parallel_size
    cache = config.cache_config
    return ModelCard(
        model=llm.model_config.model,
        max_model_len=llm.model_config.max_model_len,
        # In hybrid models full attention may have larger blocks than the rest; its blocks count for the prefix cache.
        block_size=(cache.effective_attention_block_size or cache.block_size) if cache.enable_prefix_caching else 0,
        processor=processor_settings(llm.model_config, profile),
        # An encoder-decoder's outputs are not kept for other requests.
        encoder_cache_tokens=0 if llm.model_config.is_encoder_decoder else encoder_cache_tokens(llm),
        num_kv_blocks=(cache.num_gpu_blocks or 0) // num_ranks,  # vLLM reports the sum over its ranks
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        data_parallel_size=num_ranks,
        max_loras=config.lora_config.max_loras if config.lora_config is not None else 0,
        role=ENCODER if config.is_mm_encoder_only else role,
        kv_group=kv_group(config),
    )
