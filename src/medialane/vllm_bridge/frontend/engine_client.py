"""vLLM's `EngineClient` over the workers: the gateway chooses one for each request.

Requests get the version of a LoRA adapter whose files were there when this gateway loaded it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from http import HTTPStatus
from typing import Any, NoReturn

import msgspec
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.renderers import BaseRenderer
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from medialane.runtime.tasks import FewPerIteration
from medialane.types import admin
from medialane.types.admin import AddLora, UnloadLora
from medialane.types.errors import (
    AdminCallIncomplete,
    GenerationFailed,
    InvalidRequest,
    MedialaneError,
    NotFound,
    NoWorkerReady,
    PromptRejected,
)
from medialane.types.request import EngineRequest, ExpandedPrompt
from medialane.vllm_bridge.engine.adapters import versioned
from medialane.vllm_bridge.engine.outputs import to_pooling_output, to_request_output, with_end_apart
from medialane.vllm_bridge.frontend.continuation import ContinuableAnswer, Continuations
from medialane.vllm_bridge.frontend.renderer_hook import remembered_errors
from medialane.vllm_bridge.frontend.request_backend import Generation
from medialane.vllm_bridge.items.prepared_input import decoder_input, note_placed, prepared_prompt
from medialane.vllm_bridge.seams.engine import FrontEndInputs, MsgpackEncoder

logger = logging.getLogger(__name__)


class AdapterVersions:
    """Has workers load and unload adapters. They read the files, which may be on their hosts only, and return the
    version. A worker that was not connected loads the version
    with the first request that names it."""

    def __init__(self, backend: Generation, encode: Callable[[Any], bytes]) -> None:
        self._backend = backend
        self._encode = encode
        #: By name; None for adapters of the command line until their first request: no worker is ready before.
        self._versions: dict[str, str | None] = {}
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def load_later(self, lora: LoRARequest) -> None:
        """Load it with the first request that names it."""
        self._versions[lora.lora_name] = None

    async def load(self, lora: LoRARequest) -> None:
        """Load an adapter as its files are now. If that fails anywhere, the version until now stays. Raises
        MedialaneError."""
        async with self._changing[lora.lora_name]:
            await self._load(lora)

    async def unload(self, name: str) -> None:
        """Raises MedialaneError: it is still loaded then."""
        async with self._changing[name]:
            await self._backend.administer(UnloadLora(name))
            self._versions.pop(name, None)

    async def of(self, lora: LoRARequest) -> LoRARequest:
        """Return the request of a worker for the adapter that a request of the app names. Raises GenerationFailed,
        NoWorkerReady, NotFound if it has been unloaded meanwhile."""
        if self._versions.get(lora.lora_name, "") is None:
            await self._load_first(lora)
        version = self._versions.get(lora.lora_name)
        if version is None:
            raise NotFound(f"The LoRA adapter `{lora.lora_name}` has been unloaded.", param="model")
        return versioned(lora, version)

    async def _load_first(self, lora: LoRARequest) -> None:
        name = lora.lora_name
        async with self._changing[name]:
            if self._versions.get(name, "") is not None:
                return
            try:
                await self._load(lora)
            except AdminCallIncomplete as error:  # its message is for operators, and logged
                raise GenerationFailed(f"the LoRA adapter {name!r} cannot be loaded by the workers") from error

    async def _load(self, lora: LoRARequest) -> None:
        name, previous = lora.lora_name, self._versions.get(lora.lora_name)
        try:
            versions = {str(version) for version in await self._backend.administer(AddLora(self._encode(lora)))}
            if len(versions) != 1:
                raise AdminCallIncomplete(
                    f"the workers have read different files of the LoRA adapter {name!r} at {lora.lora_path}: "
                    "load it once they are equal on all hosts"
                )
        except MedialaneError:
            await self._keep(name, previous or "")
            raise
        (version,) = versions
        self._versions[name] = version
        await self._keep(name, version)

    async def _keep(self, name: str, version: str) -> None:
        """Unload the other versions. Where that fails, they only use memory."""
        try:
            await self._backend.administer(UnloadLora(name, version))
        except MedialaneError as error:
            logger.warning("other versions of the LoRA adapter %r are not unloaded: %s", name, error.message)


class BridgedError(GenerationError):  # type: ignore[misc]  # vllm is not typed
    """Carries a MedialaneError through vLLM's app, which ends running streams with it. The client receives the error
    recorded in the request's scope."""

    def __init__(self, error: MedialaneError) -> None:
        super().__init__(error.message)
        self.status_code = HTTPStatus(error.status)


class RefusedByEngine(VLLMValidationError):  # type: ignore[misc]  # vllm is not typed
    """A request rejected by a worker's vLLM: the app responds as if its own vLLM had rejected it. The message is
    complete, so vLLM's suffixes are not added."""

    def __init__(self, error: PromptRejected) -> None:
        super().__init__(error.message, parameter=error.param)

    def __str__(self) -> str:
        return str(self.args[0])


class RoutedEngineClient(EngineClient):  # type: ignore[misc]  # vllm is not typed
    """Drives vLLM's OpenAI app without an engine in this process."""

    def __init__(
        self, vllm_config: VllmConfig, renderer: BaseRenderer, backend: Generation, tasks: tuple[str, ...]
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer
        self.input_processor = FrontEndInputs(vllm_config)
        #: Set once the app has been built.
        self.is_serving = False
        self._backend = backend
        self._tasks = tasks
        self._encoder = MsgpackEncoder()
        self.adapters = AdapterVersions(backend, self._encode)
        self._continuations = Continuations(vllm_config, renderer, self._encode)
        #: vLLM's app handles all prompts of a request in one iteration of the event loop, unless it waits here.
        self._pieces = FewPerIteration()

    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        return False  # losing a worker must not make vLLM's app shut down the server

    @property
    def dead_error(self) -> BaseException:
        return EngineDeadError()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Raise BridgedError if no worker is ready: once a stream has started, an error has no HTTP status."""
        with self._bridged():
            self._backend.check_ready()

    async def get_supported_tasks(self) -> Any:
        return self._tasks

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        await self._pieces.next_piece()
        with self._bridged():
            prompt = decoder_input(await self._rendered(prompt))
            request = msgspec.structs.replace(
                await self._request(
                    request_id, prompt, sampling_params, lora_request=lora_request, trace_headers=trace_headers
                ),
                prompt_text=prompt_text or prompt.get("prompt"),
                priority=priority,
                data_parallel_rank=data_parallel_rank,
                session_id=session_id,
                reasoning_ended=reasoning_ended,
                reasoning=None if reasoning_parser_kwargs is None else self._encode(reasoning_parser_kwargs),
                cumulative=sampling_params.output_kind is RequestOutputKind.CUMULATIVE,
            )
            answer = ContinuableAnswer(self._continuations, sampling_params, request.prompt.token_ids)
            async with aclosing(self._backend.generate(request, prepared_prompt(prompt), answer)) as deltas:
                async for delta in deltas:
                    if delta.prompt_token_ids:
                        answer.prompt_token_ids = delta.prompt_token_ids
                    if delta.placed:
                        note_placed(prompt, delta.placed)
                    for step in with_end_apart(delta, sampling_params, self._text_of):
                        yield to_request_output(
                            step,
                            request_id=request_id,
                            prompt=request.prompt_text,
                            prompt_token_ids=answer.prompt_token_ids,
                        )

    @contextmanager
    def _bridged(self) -> Iterator[None]:
        """Convert our exceptions, which the request's scope records, to vLLM's. A rejection by a worker's vLLM becomes
        the corresponding exception of the app's own vLLM."""
        try:
            with remembered_errors(self._backend):
                yield
        except PromptRejected as error:
            raise RefusedByEngine(error) from error
        except MedialaneError as error:
            raise BridgedError(error) from error

    async def _rendered(self, prompt: Any) -> Any:
        """Render what the app has not: the prompt with which it has a model detect the language of speech."""
        if isinstance(prompt, dict) and "type" in prompt:
            return prompt
        (rendered,) = await self.renderer.render_cmpl_async([parse_model_prompt(self.model_config, prompt)])
        return rendered

    def _text_of(self, token_id: int) -> str:
        return str(self.renderer.tokenizer.decode([token_id]))

    def _encode(self, value: Any) -> bytes:
        try:
            (encoded,) = self._encoder.encode(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest("a parameter cannot be sent to a worker") from error
        return bytes(encoded)

    async def encode(  # noqa: PLR0917 - vLLM's signature
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        await self._pieces.next_piece()
        with self._bridged():
            reads_cache = not pooling_params.skip_reading_prefix_cache and self.model_config.is_prefix_caching_supported
            request = msgspec.structs.replace(
                await self._request(
                    request_id, prompt, pooling_params, lora_request=lora_request, trace_headers=trace_headers
                ),
                priority=priority,
                is_pooling=True,
                reads_prefix_cache=reads_cache,
            )
            async with aclosing(self._backend.generate(request, prepared_prompt(prompt))) as deltas:
                async for delta in deltas:  # a single one
                    # The app counts the tokens of its own prompt, which may have been expanded by the worker.
                    prompt["prompt_token_ids"] = delta.prompt_token_ids or request.prompt.token_ids
                    yield to_pooling_output(delta, request_id=request_id, prompt_token_ids=prompt["prompt_token_ids"])

    async def _request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        *,
        lora_request: LoRARequest | None,
        trace_headers: Mapping[str, str] | None,
    ) -> EngineRequest:
        """Return what generation and pooling requests have in common."""
        lora = None if lora_request is None else await self.adapters.of(lora_request)
        return EngineRequest(
            request_id=request_id,
            prompt=ExpandedPrompt(_token_ids(prompt)),
            sampling_params=self._encode(params),
            cache_salt=prompt.get("cache_salt"),
            lora=None if lora is None else self._encode(lora),
            lora_name=None if lora_request is None else lora_request.lora_name,
            adapter=None if lora is None else lora.lora_name,
            trace_headers=None if trace_headers is None else dict(trace_headers),
        )

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Unsupported: a request is aborted by closing its generator, as vLLM's app does with its own."""
        _unsupported("aborting requests by id")

    async def check_health(self) -> None:
        try:
            self._backend.check_ready()
        except NoWorkerReady as error:
            raise EngineDeadError(error.message) from error

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        """No-op: parameters of clients reach no connector."""

    async def is_tracing_enabled(self) -> bool:
        """Called by the app before it makes the request of each prompt."""
        await self._pieces.next_piece()
        return self.vllm_config.observability_config.otlp_traces_endpoint is not None

    async def do_log_stats(self) -> None:
        """Workers log their own statistics."""

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        await self._all(admin.StartProfile(profile_prefix, delay_iterations, max_iterations))

    async def stop_profile(self) -> None:
        await self._all(admin.StopProfile())

    async def reset_mm_cache(self) -> None:
        await self._all(admin.ResetMmCache())

    async def reset_encoder_cache(self) -> None:
        await self._all(admin.ResetEncoderCache())

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return all(await self._all(admin.ResetPrefixCache(reset_running_requests, reset_connector)))

    async def sleep(self, level: int = 1, mode: admin.PauseMode = "abort") -> None:
        await self._all(admin.Sleep(level, mode))

    async def release_kv_cache_memory(self) -> None:
        await self._all(admin.ReleaseKvCacheMemory())

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        return all(await self._all(admin.WakeUp(None if tags is None else tuple(tags))))

    async def is_sleeping(self) -> bool:
        return await self._agreed(admin.IsSleeping(), "are asleep")

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Make all ready workers load an adapter; adapters of the command line, which vLLM adds while the app is built,
        before any worker is ready, are loaded with the first request that names them."""
        if not self.is_serving:
            self.adapters.load_later(lora_request)
            return True
        try:  # vLLM's app maps the error to a response: 404 for an adapter that does not exist
            await self.adapters.load(lora_request)
        except MedialaneError as error:
            raise BridgedError(error) from error
        return True

    async def pause_generation(self, *, mode: admin.PauseMode = "abort", clear_cache: bool = True) -> None:
        await self._all(admin.PauseGeneration(mode, clear_cache))

    async def resume_generation(self) -> None:
        await self._all(admin.ResumeGeneration())

    async def is_paused(self) -> bool:
        return await self._agreed(admin.IsPaused(), "are paused")

    async def _all(self, call: admin.AdminCall) -> list[admin.AdminResult]:
        """Return the results of all workers. Raises BridgedError, which names the workers that failed."""
        with self._bridged():
            return await self._backend.administer(call)

    async def _agreed(self, call: admin.AdminCall, what: str) -> bool:
        """Return the state that all workers report. Raises BridgedError if they differ."""
        with self._bridged():
            states = await self._backend.administer(call)
            if len(set(states)) > 1:
                num_true = sum(map(bool, states))
                raise AdminCallIncomplete(f"{num_true} of {len(states)} workers {what}, the others are not")
            return all(states)

    def shutdown(self, timeout: float | None = None) -> None:
        """No-op: the gateway closes its resources itself."""


def encode_params() -> bytes:
    """Return the parameters of a request to an encoder, in the engine's encoding.

    An encode-only engine samples nothing: it ends the request, with finish reason `stop`, once its items are encoded.
    """
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    (encoded,) = MsgpackEncoder().encode(params)
    return bytes(encoded)


def _unsupported(what: str) -> NoReturn:
    raise NotImplementedError(f"{what} is not supported: this gateway has several engines")


def _token_ids(prompt: Any) -> list[int]:
    if prompt["type"] not in ("token", "multimodal"):
        raise InvalidRequest("prompts given as embeddings are not supported by this gateway")
    return list(prompt["prompt_token_ids"])
