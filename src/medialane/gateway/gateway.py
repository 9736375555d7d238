"""Serves one request: prepare, route, transfer, stream, release."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from medialane.core.admin import AdminCall, AdminResult
from medialane.core.errors import (
    FeatureUnsupported,
    GenerationFailed,
    HandoverFailed,
    InvalidFeature,
    InvalidRequest,
    MedialaneError,
    MediaLost,
    NoWorkerReady,
    PromptRejected,
    PromptTooLong,
    WorkerLost,
)
from medialane.core.feature import MediaPrompt, PlacedFeature, PreparedPrompt
from medialane.core.hashing import merged_options
from medialane.core.kv_events import BlockIds
from medialane.core.media import MediaRef, audio_io
from medialane.core.request import EngineRequest, OutputDelta
from medialane.core.stage import RAW_STAGE, STAGES, Stage, StageChoice, StageName, prepared_stage
from medialane.core.wave import wave_size
from medialane.gateway.administration import administer
from medialane.gateway.admission import Admission
from medialane.gateway.assembly import Assembly
from medialane.gateway.config import GatewayConfig
from medialane.gateway.encoders import Encoders
from medialane.gateway.handover import prompt_for
from medialane.gateway.report import Sent
from medialane.gateway.request_media import RequestMedia
from medialane.gateway.route import Route, Routes
from medialane.gateway.scope import RequestScope, current_scope
from medialane.gateway.store_features import StoreFeatures
from medialane.gateway.transports import TransferPath, Transports
from medialane.gateway.worker_link.remote_request import RemoteRequest
from medialane.gateway.workers import WorkerLink, WorkerPool, on_hosts_of
from medialane.observability.metrics import Metrics
from medialane.prepare import Assembler

if TYPE_CHECKING:
    from medialane.routing import Router

logger = logging.getLogger(__name__)

#: Workers that a request is sent to, one after the other, while each is lost before the first token. Not more: the
#: request itself may be what ends their engines.
_MAX_WORKERS = 2


_MEDIA_LOST = "the media store was lost while this request's media were sent to a worker"


class _Call(NamedTuple):
    """A request, its worker, and the paths by which it can still be sent there, best first. Text is part of the request
    message: `prepared` is None, as is its only path. `lost` are the workers that were lost with it."""

    request: EngineRequest
    prepared: PreparedPrompt | None
    scope: RequestScope
    route: Route
    paths: Sequence[TransferPath | None]
    lost: frozenset[str] = frozenset()


class Gateway:
    """Called by vllm_bridge's app twice per request: `prepare` for rendering, `generate` for generation."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        transports: Transports,
        features: StoreFeatures,
        assembler: Assembler,
        workers: WorkerPool,
        router: Router,
        metrics: Metrics,
        encoders: Encoders | None = None,
    ) -> None:
        self._config = config
        self._transports = transports
        self._features = features
        self._assembly = Assembly(assembler)
        self._accepts_item_options = assembler.accepts_item_options
        self._fallback_stages = assembler.fallback_stages
        self._workers = workers
        self.routes = Routes(router, workers, metrics)
        self._encoder_ms_per_token = router.config.encoder_ms_per_token
        self._metrics = metrics
        self._encoders = encoders
        self._num_sent = 0
        # A worker has several gateways and clients may choose request ids, so ours contain the gateway and the attempt.
        self._gateway_id = secrets.token_hex(4)
        self._admission = Admission(config.max_requests)

    def fail(self, error: MedialaneError) -> None:
        """Record `error` as the response to the current request."""
        current_scope().fail(error)

    def resolve(self, url: str) -> MediaRef:
        return current_scope().resolve(url)

    def original_url(self, url: str) -> str:
        return current_scope().resolve(url).client_url

    async def by_uuid(self, url: str) -> MediaRef:
        scope = current_scope()
        self._admission.admit(scope)
        return await self._features.resolve(scope.resolve(url))

    def check_ready(self) -> None:
        if not self._workers.num_ready:
            raise NoWorkerReady("no worker is ready to take requests", retry_after_s=self._workers.retry_after_s)

    @property
    def text_bytes(self) -> int | None:
        return current_scope().extracted.text_bytes

    async def prepare(self, prompt: MediaPrompt) -> PreparedPrompt:
        """Look up or prepare what the prompt's stage sends; for a processed stage, also expand the placeholders.

        The result refers to the media, whose leases end with the request's scope. Raises MedialaneError.
        """
        scope = current_scope()
        self._admission.admit(scope)
        prompt = _with_common_options(prompt)
        stage = prepared_stage(self._stage_for(prompt))
        if stage.is_processed and stage.instead and self._instead(prompt):
            stage = STAGES[stage.instead]
        if not (stage.is_processed and self._accepts_item_options):
            _check_options(prompt)
        encoder = self.routes.encoder if self._transports.carry_embeddings else ""
        media = RequestMedia(prompt, self._features, scope, self._assembly, encoder=encoder)
        try:
            return await self._prepared(prompt, stage, media, scope)
        except PromptTooLong as error:
            scope.fail(error, app_responds=True)
            raise
        except FeatureUnsupported as error:
            if self._config.stage != "auto" or stage.instead is None:
                raise
            logger.warning("a request is sent in stage %s, not %s: %s", stage.instead, stage.name, error.message)
            self._metrics.count_fallback(stage.name, error.code)
            _check_options(prompt)
            return await self._prepared(prompt, STAGES[stage.instead], media, scope)

    async def _prepared(
        self, prompt: MediaPrompt, stage: Stage, media: RequestMedia, scope: RequestScope
    ) -> PreparedPrompt:
        items = await media.in_stage(stage.name)
        mm_hashes = tuple(item.feature.mm_hash for item in items)
        if not stage.is_processed:
            scope.note_prepared(items)
            encoder_token_ids = prompt.token_ids if prompt.is_encoder_prompt else None
            return PreparedPrompt(prompt.token_ids, (), mm_hashes, prompt, media, encoder_token_ids)
        features = tuple(item.feature for item in items)
        with scope.timeline.measure("assemble"):
            assembled = await self._assembly.assemble(prompt, features)
        scope.note_prepared(items, [place.num_embeds for place in assembled.placeholders])
        placed = tuple(map(PlacedFeature, features, assembled.placeholders))
        return PreparedPrompt(assembled.token_ids, placed, mm_hashes, prompt, media, assembled.encoder_token_ids)

    async def decode_audio(self, url: str, sample_rate: int) -> bytes:
        scope = current_scope()
        self._admission.admit(scope)
        ref = msgspec.structs.replace(scope.resolve(url), io=audio_io(sample_rate))
        (item,) = await RequestMedia(MediaPrompt([], (ref,)), self._features, scope, self._assembly).in_stage("decoded")
        _charge(scope, wave_size(item.feature.size.num_samples))
        return await self._features.wave(self._features.samples(item.feature), sample_rate)

    async def audio(self, samples: NDArray[np.float32], sample_rate: int) -> MediaRef:
        scope = current_scope()
        _charge(scope, wave_size(samples.size))
        data = await self._features.wave(samples, sample_rate)
        return msgspec.structs.replace(scope.extracted.refs[0], data=data)

    async def publish_images(self) -> bytes:
        """Decode and publish the images of the current request for RDMA reads."""
        scope = current_scope()
        self._admission.admit(scope)
        refs = scope.extracted.refs
        if not refs or any(ref.modality != "image" or ref.is_embeds for ref in refs):
            raise InvalidRequest("the request must have images, and no other media", param="messages")
        resolved = MediaPrompt([], tuple([await self._features.resolve(ref) for ref in refs]))
        items = await RequestMedia(resolved, self._features, scope, self._assembly).in_stage("decoded")
        images = [await self._features.publish(item.feature.tensors[0].range) for item in items]
        return b'{"images":[%b]}' % b",".join(images)

    async def generate(
        self, request: EngineRequest, prepared: PreparedPrompt | None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Generate at the best worker, its media transferred by the first transfer path that works; at another worker
        if that is lost before its first output.

        `prepared` is the result of `prepare`, None for text. Closing the generator aborts the request at the worker.
        Raises MedialaneError.
        """
        scope, block_ids = current_scope(), dict[int, BlockIds]()
        try:
            prepared = await self._with_embeddings(request, prepared, scope, block_ids)
            call = self._route(request, prepared, scope, block_ids=block_ids)
            started = False
            while True:
                try:
                    async with aclosing(self._attempt(call)) as deltas:
                        async for delta in deltas:
                            started = True
                            yield delta
                    return
                except (HandoverFailed, InvalidFeature, WorkerLost) as error:
                    call = await self._next_attempt(call, error, started=started)
        except MedialaneError as error:
            if isinstance(error, WorkerLost) and not self._workers.num_ready:
                error.retry_after_s = self._workers.retry_after_s
            # If a worker's vLLM rejected the prompt, the app responds as if its own vLLM had.
            scope.fail(error, app_responds=isinstance(error, PromptRejected))
            raise

    async def administer(self, call: AdminCall) -> list[AdminResult]:
        """Execute `call` in every worker's engine. Raises what `administration.administer` raises."""
        return await administer(self._workers, call, timeout_s=self._config.admin_timeout_s)

    def close(self) -> None:
        self._assembly.close()

    async def _next_attempt(
        self, call: _Call, error: HandoverFailed | InvalidFeature | WorkerLost, *, started: bool
    ) -> _Call:
        """Return how the request is sent after an attempt that has failed with `error`. Raises the request's error if
        its output has `started`, or nothing is left to try."""
        if isinstance(error, WorkerLost):
            if started:
                raise error
            return self._reroute(call, error)
        if isinstance(error, InvalidFeature):
            return self._without_features(call, error)
        logger.warning("transfer to %s by %s failed: %s", call.route.link.name, call.paths[0], error.message)
        if not started and await self._drop_embeddings(call.prepared):
            return call  # the same path, with tensors
        if started or len(call.paths) == 1:
            raise self._untransferable(error, call.prepared) from error
        self._metrics.count_fallback(str(call.paths[0]), error.code)
        return call._replace(paths=call.paths[1:])

    async def _with_embeddings(
        self,
        request: EngineRequest,
        prepared: PreparedPrompt | None,
        scope: RequestScope,
        block_ids: dict[int, BlockIds],
    ) -> PreparedPrompt | None:
        """Have encoders encode the items that no worker has, where that is best; their embeddings are then sent. For
        `block_ids` see `Routes.new_items`."""
        digest = self.routes.encoder
        if prepared is None or self._encoders is None or not self._encoders.is_ready(digest):
            return prepared
        new = [placed for placed in prepared.features if placed.feature.embedding is None and placed.feature.tensors]
        if not new or not (hashes := self.routes.new_items(request, prepared, block_ids)):
            return prepared
        new = [placed for placed in new if placed.feature.mm_hash in hashes]
        encoded = await self._encoders.encode(prepared, new, digest, scope.timeline)
        if not encoded:
            return prepared
        features = await prepared.media.with_embeddings(encoded)
        placed = map(PlacedFeature, features, [placed.placeholder for placed in prepared.features])
        return msgspec.structs.replace(prepared, features=tuple(placed))

    def _route(
        self,
        request: EngineRequest,
        prepared: PreparedPrompt | None,
        scope: RequestScope,
        excluded: frozenset[str] = frozenset(),
        *,
        block_ids: dict[int, BlockIds] | None = None,
    ) -> _Call:
        """Choose a worker, and the transfer paths to it in the order of preference. Raises NoWorkerReady."""
        self.check_ready()
        with scope.timeline.measure("route"):
            route = self.routes.choose(request, prepared, excluded, block_ids=block_ids)
            scope.defer(route.routed.release)
            return _Call(request, prepared, scope, route, self._transfer_paths(route.link, prepared))

    async def _drop_embeddings(self, prepared: PreparedPrompt | None) -> bool:
        """Have media that are sent by embeddings made anew, if there are any. Raises what preparing them raises."""
        if prepared is None:
            return False
        try:
            num_items = await prepared.media.without_embeddings()
        except HandoverFailed as error:
            logger.warning("%s: features cannot be sent", error.message)
            return False
        self._metrics.count_embeddings("fallback", num_items)
        return num_items > 0

    def _without_features(self, call: _Call, error: InvalidFeature) -> _Call:
        """Have the worker process the media itself, after it has refused our features. Raises `error` if it would do
        the same: by the request's options, or already."""
        refused, sources = call.paths[0], [path for path in call.paths if path and not path.stage.is_processed]
        if refused is None or not refused.stage.is_processed or not sources or _has_options(call.prepared):
            raise error
        logger.warning("%s refused %s: %s", call.route.link.name, refused, error.message)
        self._metrics.count_fallback(str(refused), error.code)
        return call._replace(paths=sources)

    def _reroute(self, call: _Call, error: WorkerLost) -> _Call:
        """Choose a worker that is not lost, of another host if there is one: a lost link or host costs all workers
        there, one after the other. Raises `error` if there is none, or enough were tried. The scope still holds the
        media."""
        lost = call.lost | {call.route.link.name}
        if len(lost) == _MAX_WORKERS:
            raise error
        call.route.routed.release()
        addresses = {name: link.address for name, link in self._workers.links.items()}
        for excluded in (on_hosts_of(lost, addresses), lost):
            with suppress(NoWorkerReady):
                rerouted = self._route(call.request, call.prepared, call.scope, excluded)
                logger.warning("%s: %s; sending to another worker", call.route.link.name, error.message)
                self._metrics.count_rerouted()
                return rerouted._replace(lost=lost)
        raise error

    def _stage_for(self, prompt: MediaPrompt) -> StageChoice:
        is_raw = self._config.stage == "auto" and RAW_STAGE in self._instead(prompt)
        return RAW_STAGE if prompt.has_embeds or is_raw else self._config.stage

    def _instead(self, prompt: MediaPrompt) -> set[StageName]:
        """Return the stages that items of the prompt need instead of the first."""
        modalities = {item.modality for item in prompt.items}
        return {stage for modality, stage in self._fallback_stages.items() if modality in modalities}

    def _transfer_paths(self, link: WorkerLink, prepared: PreparedPrompt | None) -> Sequence[TransferPath | None]:
        if prepared is None:
            return (None,)
        paths = self._transports.paths(self._stage_for(prepared.source), link, prepared=bool(prepared.features))
        if not paths and prepared.media.is_lost:  # no descriptor of another arena is sent
            raise self._features.unavailable(_MEDIA_LOST)
        if not paths:
            raise NoWorkerReady("no worker supports the configured --stage and --transport (see the log)")
        return paths

    def _untransferable(self, error: HandoverFailed, prepared: PreparedPrompt | None) -> MedialaneError:
        """Return the error of a request for which the last transfer path has failed."""
        if isinstance(error, MediaLost) or (prepared is not None and prepared.media.is_lost):
            return self._features.unavailable(_MEDIA_LOST)
        return GenerationFailed("the request's media could not be transferred to a worker")

    async def _attempt(self, call: _Call) -> AsyncGenerator[OutputDelta, None]:
        """Send the request by its first path and stream the output."""
        timeline = call.scope.timeline
        with timeline.measure("handover"):
            remote = await self._send(call)
        self._begin(call)
        sent_at = time.perf_counter()
        is_first = True
        try:
            async for delta in remote:
                if is_first:
                    is_first = False
                    if "first_token" not in timeline.seconds:  # of another prompt of the request
                        timeline.add("first_token", time.perf_counter() - sent_at)
                    outcomes = self.routes.answered(call.route, call.prepared, delta)
                    call.scope.note_answered(delta.num_cached_tokens, outcomes, delta.movers)
                    self._metrics.count_copied(delta.movers)
                if delta.embedded and call.prepared is not None:
                    call.prepared.media.note_embedded(delta.embedded)
                if delta.times is not None:
                    timeline.add("queue", delta.times.queue_s)
                    timeline.add("prefill", delta.times.prefill_s)
                yield delta
        finally:
            remote.abort()

    async def _send(self, call: _Call) -> RemoteRequest:
        """Transfer the request by its first path. Raises HandoverFailed, WorkerLost."""
        request, prepared, scope, route, (path, *_), _ = call
        self._num_sent += 1
        request_id = f"{request.request_id}#{self._gateway_id}-{self._num_sent}"
        prompt, has_passed_holds = request.prompt, False
        if prepared is not None and path is not None:
            if not path.stage.is_processed or path.transport.needs_remote_store:
                # Other requests may be routed while its media are being fetched, or granted to another host.
                self._begin(call, is_sent=False)
            sends_embeddings = path.transport.carries_embeddings and route.link.encoder == self.routes.encoder
            if path.stage.is_processed and not sends_embeddings:
                await self._drop_embeddings(prepared)
            prompt = await prompt_for(
                path, prompt.token_ids, prepared, scope.timeline, encoder_ms_per_token=self._encoder_ms_per_token
            )
            has_passed_holds = path.transport.pass_holds(prompt, route.link, request_id)
        sent = msgspec.structs.replace(
            request,
            request_id=request_id,
            prompt=prompt,
            data_parallel_rank=route.data_parallel_rank,
            has_passed_holds=has_passed_holds,
        )
        remote = route.link.submit(sent)
        # A stream that vLLM's app drops without closing is aborted with the scope, not at garbage collection.
        scope.defer(remote.abort)
        return remote

    def _begin(self, call: _Call, *, is_sent: bool = True) -> None:
        with call.scope.timeline.measure("route"):
            self.routes.begin(call.route, call.request.request_id, is_sent=is_sent)
            call.scope.note_sent(Sent(call.route.routed.decision, call.paths[0]))


def _charge(scope: RequestScope, num_bytes: int) -> None:
    """Charge samples of an upload, which are several times as large as the file. Raises BodyMemoryExhausted."""
    if scope.memory is not None:
        scope.memory.add(num_bytes)


def _with_common_options(prompt: MediaPrompt) -> MediaPrompt:
    """Move options that all items share to the request, where every stage and every model family supports them."""
    merged = {merged_options(prompt.options, ref.options) for ref in prompt.items if not ref.is_embeds}
    if len(merged) != 1:
        return prompt
    items = tuple(msgspec.structs.replace(ref, options=b"{}") for ref in prompt.items)
    return msgspec.structs.replace(prompt, items=items, options=merged.pop())


def _has_options(prepared: PreparedPrompt | None) -> bool:
    """Return whether the request has options of the processor, which every stage applies."""
    if prepared is None:
        return False
    return prepared.source.options != b"{}" or any(ref.options != b"{}" for ref in prepared.source.items)


def _check_options(prompt: MediaPrompt) -> None:
    """Raise InvalidRequest if an item has options that other items do not share."""
    own = next((ref for ref in prompt.items if ref.options != b"{}"), None)
    if own is not None:
        message = "with this model and stage all items of a request must have the same min_pixels and max_pixels"
        raise InvalidRequest(message, param=own.param)
