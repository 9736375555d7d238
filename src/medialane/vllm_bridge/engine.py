"""vLLM's AsyncLLM as a worker's engine (fills `worker.Engine`).

Theory of operation. A request's features arrive as views of an arena or of the message, and everything about them is
checked before vLLM sees them (`validation`). vLLM's front end, in this process, sends the request to its EngineCore
process; tensors that lie in an arena that EngineCore has mapped go as descriptors (`arena_encoder`, `arena_decoder`).

*Letting go.* The caller may reuse a request's bytes when `generate` has ended, so it must not end while EngineCore may
read them. After a finish that EngineCore decided, it does not. After an abort, or a stop string, which only the front
end sees, EngineCore still runs: we send utility calls through the same queue, each answered between two steps, until
every step that was under way is over. Where the answers do not come within `release_timeout_s`, nothing is known:
`generate` does not end then, `ping` reports the engine as lost, and the process's end lets go of everything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.inputs import mm_input, tokens_input
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder

from medialane.core.errors import (
    GenerationFailed,
    HandoverFailed,
    InvalidFeature,
    PromptRejected,
    StartupFailed,
    WorkerLost,
)
from medialane.core.request import EngineRequest, ExpandedPrompt, ModelCard, OutputDelta, SourcePrompt, WorkerLoad
from medialane.core.tensor import TensorDescriptor
from medialane.vllm_bridge.arena_decoder import install
from medialane.vllm_bridge.arena_encoder import ArenaConsumer
from medialane.vllm_bridge.engine_errors import REFUSED, mapped_errors
from medialane.vllm_bridge.engine_options import engine_args
from medialane.vllm_bridge.features import decode_item
from medialane.vllm_bridge.outputs import to_delta
from medialane.vllm_bridge.renderer_hook import to_vllm_range
from medialane.vllm_bridge.settings import processor_settings
from medialane.vllm_bridge.source_prompt import SourceRenderer
from medialane.vllm_bridge.validation import FeatureChecker

logger = logging.getLogger(__name__)

#: How often a wait for EngineCore looks whether it still lives: a dead one never answers.
ALIVE_CHECK_S = 0.2

#: What the typed decoders raise for bytes that are not what they should be.
_UNREADABLE = (msgspec.DecodeError, NotImplementedError, TypeError, ValueError, RecursionError)


def build_engine(
    model: str,
    vllm_args: Sequence[str],
    *,
    arena_directory: str = "/dev/shm",  # noqa: S108 - where ArenaConfig puts arenas
    release_timeout_s: float = 60.0,
) -> VllmEngine:
    """Start vLLM in this process and its children. Blocks for tens of seconds; call it before serving.

    `vllm_args` are vLLM's own flags. `release_timeout_s` bounds the wait until EngineCore has let go of an aborted
    request. Raises StartupFailed. The caller owns the engine and closes it.
    """
    args = engine_args(model, vllm_args)
    install()
    recorder = LoadRecorder()
    try:
        llm = AsyncLLM.from_engine_args(
            args, usage_context=UsageContext.OPENAI_API_SERVER, stat_loggers=[recorder.factory]
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise StartupFailed(f"vLLM does not start: {error}") from error
    return VllmEngine(llm, recorder, arena_directory=arena_directory, release_timeout_s=release_timeout_s)


class LoadRecorder:
    """The scheduler's latest numbers, which vLLM gives to its stat loggers after every step."""

    def __init__(self) -> None:
        self.stats = SchedulerStats()

    def factory(self, _config: VllmConfig, _engine_index: int = 0) -> StatLoggerBase:
        recorder = self

        class Logger(StatLoggerBase):  # type: ignore[misc]  # vllm is not typed
            def __init__(self) -> None:
                """Everything is kept by the recorder."""

            def record(self, scheduler_stats: SchedulerStats | None, *_args: Any, **_kwargs: Any) -> None:
                recorder.stats = scheduler_stats or recorder.stats

            def log_engine_initialized(self) -> None:
                """vLLM's own loggers say it."""

        return Logger()


class VllmEngine:
    """One AsyncLLM. Made by `build_engine`."""

    def __init__(
        self, llm: AsyncLLM, recorder: LoadRecorder, *, arena_directory: str, release_timeout_s: float
    ) -> None:
        self._llm = llm
        self._recorder = recorder
        self._arena_directory = arena_directory
        self._release_timeout_s = release_timeout_s
        self._num_releases_unknown = 0
        self._num_faults = 0
        self._arenas: set[str] = set()
        self._consumer = ArenaConsumer(llm.engine_core.encoder.oob_tensor_consumer)
        llm.engine_core.encoder.oob_tensor_consumer = self._consumer
        takes_media = llm.model_config.supports_multimodal_inputs
        processor = llm.renderer.get_mm_processor() if takes_media else None
        self._checker = None if processor is None else FeatureChecker(processor)
        self._sources = SourceRenderer(llm.renderer, llm.model_config)
        self._params = MsgpackDecoder(SamplingParams)
        self._lora = MsgpackDecoder(LoRARequest)
        self.card = ModelCard(
            model=llm.model_config.model,
            max_model_len=llm.model_config.max_model_len,
            block_size=llm.vllm_config.cache_config.block_size,
            mm_limits={} if processor is None else dict(processor.info.allowed_mm_limits),
            processor=processor_settings(llm.model_config, llm.renderer),
        )

    def load(self) -> WorkerLoad:
        """Requests are counted now, how many of them run as of the last step: an idle engine takes no steps."""
        total = self._llm.get_num_unfinished_requests()
        running = min(total, self._recorder.stats.num_running_reqs)
        return WorkerLoad(running, total - running, self._recorder.stats.kv_cache_usage if total else 0.0)

    async def attach_arena(self, arena: str, nonce: bytes) -> bool:
        try:
            found = await self._ask("medialane_attach", arena, self._arena_directory, nonce.hex())
        except GenerationFailed:
            logger.warning("EngineCore has no medialane plugin (VLLM_PLUGINS?): features are copied to it")
            return False
        if all(found):
            self._arenas.add(arena)
        return all(found)

    async def generate(
        self, request: EngineRequest, tensors: Sequence[Sequence[memoryview]]
    ) -> AsyncGenerator[OutputDelta, None]:
        params = self._sampling_params(request)
        offered = self._offered(request, tensors)
        with mapped_errors(), self._consumer.offering(offered):
            engine_input = await self._engine_input(request, tensors)
            _clamp(params, engine_input, self.card.max_model_len)
            outputs = self._outputs(request, engine_input, params)
            async with aclosing(outputs):
                first = True
                async for output in outputs:
                    if offered and _has_error(output):
                        await self._check_faults()
                    yield to_delta(output, with_prompt=first)
                    first = False

    async def ping(self, timeout_s: float) -> None:
        if self._llm.errored or self._num_releases_unknown:
            raise WorkerLost("the worker's engine has died")
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask("is_sleeping")
        except TimeoutError as error:
            raise GenerationFailed(f"the engine has not answered for {timeout_s:g} s") from error

    async def close(self) -> None:
        """Stop EngineCore and its children. Idempotent."""
        self._sources.close()
        await asyncio.get_running_loop().run_in_executor(None, self._llm.shutdown)

    async def _outputs(
        self, request: EngineRequest, engine_input: Any, params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's outputs. It ends only when EngineCore has let go of the request."""
        settled = False
        generating = self._llm.generate(
            engine_input,
            params,
            request.request_id,
            lora_request=self._decoded(self._lora, request.lora, "LoRA request"),
            trace_headers=request.trace_headers,
            priority=request.priority,
            data_parallel_rank=request.data_parallel_rank,
            session_id=request.session_id,
            reasoning_ended=request.reasoning_ended,
            reasoning_parser_kwargs=_reasoning(request),
        )
        try:
            async with aclosing(generating):
                async for output in generating:
                    settled = output.finished and not _stopped_by_front_end(output)
                    yield output
        except REFUSED:
            settled = True
            raise
        finally:
            if not settled:
                await self._let_go(request.request_id)

    async def _let_go(self, request_id: str) -> None:
        """Return when EngineCore reads nothing of an aborted request any more; see the theory of operation."""
        # A step may be under way for each pipeline stage, one more with asynchronous scheduling; and the abort after a
        # stop string may leave this process after the first call.
        num_calls = 2 + self._llm.vllm_config.parallel_config.pipeline_parallel_size
        try:
            async with asyncio.timeout(self._release_timeout_s):
                for _ in range(num_calls):
                    await self._ask("is_sleeping")
        except WorkerLost:
            return  # a dead process reads nothing
        except (TimeoutError, GenerationFailed):
            self._num_releases_unknown += 1
            logger.critical("request %s: the engine does not confirm that it has let go", request_id)
            await asyncio.Event().wait()  # the end of the process, which `ping` asks for

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        """Call a utility of every EngineCore. Raises WorkerLost when it dies meanwhile, GenerationFailed when the
        utility does. Has no deadline of its own."""
        call = asyncio.ensure_future(self._llm.engine_core.call_utility_all_async(method, *args))
        try:
            while not call.done():
                if self._llm.errored:
                    raise WorkerLost("the worker's engine has died")
                await asyncio.wait({call}, timeout=ALIVE_CHECK_S)
            return list(call.result())
        except EngineDeadError as error:
            raise WorkerLost("the worker's engine has died") from error
        except WorkerLost:
            raise
        except Exception as error:  # vLLM has no narrower type for a failed utility
            raise GenerationFailed(f"the engine failed a call of {method}") from error
        finally:
            call.cancel()

    async def _check_faults(self) -> None:
        """A request with arena tensors ended in an error: raise HandoverFailed if EngineCore could not read them."""
        async with asyncio.timeout(self._release_timeout_s):
            total = sum(await self._ask("medialane_faults"))
        if total > self._num_faults:
            self._num_faults = total
            raise HandoverFailed("the engine could not read the features from the arena")

    def _offered(
        self, request: EngineRequest, tensors: Sequence[Sequence[memoryview]]
    ) -> list[tuple[TensorDescriptor, memoryview]]:
        """Descriptors that EngineCore can resolve by itself, with their bytes."""
        if not isinstance(request.prompt, ExpandedPrompt):
            return []
        return [
            (tensor, data)
            for feature, datas in zip(request.prompt.features, tensors, strict=True)
            for tensor, data in zip(feature.tensors, datas, strict=True)
            if isinstance(tensor, TensorDescriptor) and tensor.range.arena in self._arenas and data.nbytes
        ]

    async def _engine_input(self, request: EngineRequest, tensors: Sequence[Sequence[memoryview]]) -> Any:
        prompt = request.prompt
        if isinstance(prompt, SourcePrompt):
            return await self._sources.render(request, prompt)
        if not prompt.features:
            return tokens_input(prompt.token_ids, prompt=request.prompt_text, cache_salt=request.cache_salt)
        if self._checker is None:
            raise PromptRejected("this model takes no media")
        items = [decode_item(f.header, data) for f, data in zip(prompt.features, tensors, strict=True)]
        self._checker.check(prompt, items)
        kwargs: dict[str, list[Any]] = {}
        hashes: dict[str, list[str]] = {}
        ranges: dict[str, list[Any]] = {}
        for feature, item in zip(prompt.features, items, strict=True):
            kwargs.setdefault(feature.modality, []).append(item)
            hashes.setdefault(feature.modality, []).append(feature.mm_hash)
            ranges.setdefault(feature.modality, []).append(to_vllm_range(feature.placeholder))
        return mm_input(
            prompt.token_ids,
            MultiModalKwargsItems(kwargs),
            hashes,
            ranges,
            prompt=request.prompt_text,
            cache_salt=request.cache_salt,
        )

    def _sampling_params(self, request: EngineRequest) -> SamplingParams:
        return self._decoded(self._params, request.sampling_params, "sampling parameters")

    def _decoded(self, decoder: MsgpackDecoder, data: bytes | None, what: str) -> Any:
        if data is None:
            return None
        with _readable(what):
            return decoder.decode(data)


@contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise PromptRejected(f"the request's {what} cannot be read") from error


def _reasoning(request: EngineRequest) -> dict[str, Any] | None:
    if request.reasoning is None:
        return None
    with _readable("reasoning arguments"):
        return msgspec.msgpack.decode(request.reasoning, type=dict[str, Any])


def _clamp(params: SamplingParams, engine_input: Mapping[str, Any], max_model_len: int) -> None:
    """The gateway counted an unexpanded prompt in stage `url`. A prompt that leaves no room is vLLM's to refuse."""
    left = max_model_len - len(engine_input["prompt_token_ids"])
    if params.max_tokens is not None and 0 < left < params.max_tokens:
        params.max_tokens = left
        params.min_tokens = min(params.min_tokens, left)


def _has_error(output: RequestOutput) -> bool:
    return any(completion.finish_reason == "error" for completion in output.outputs)


def _stopped_by_front_end(output: RequestOutput) -> bool:
    return any(isinstance(completion.stop_reason, str) for completion in output.outputs)
