"""Serves one request: prepare, route, transfer, stream, release."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from medialane.gateway.administration import administer
from medialane.gateway.admission import Admission, Queues, SharedCounts, Ticket
from medialane.gateway.assembly import Assembly
from medialane.gateway.attempts import Sender
from medialane.gateway.client_features import ClientFeatures, expanded_prompt
from medialane.gateway.config import GatewayConfig
from medialane.gateway.encoders import Encoders
from medialane.gateway.generation import Generation
from medialane.gateway.image_budget import ImageBudget
from medialane.gateway.plain_hashes import PlainHashes
from medialane.gateway.references import FEATURE_SCHEME
from medialane.gateway.request_media import RequestMedia
from medialane.gateway.route import Routes
from medialane.gateway.scope import RequestScope, current_scope, while_connected
from medialane.gateway.store_features import StoreFeatures
from medialane.gateway.transports import Transports
from medialane.gateway.wave import wave_size
from medialane.gateway.worker_pool import WorkerPool
from medialane.observability.metrics import Metrics
from medialane.prepare import Assembler
from medialane.prepare.processor import ProcessedItem
from medialane.types.admin import AdminCall, AdminResult
from medialane.types.errors import (
    ClientDisconnected,
    ClientTooSlow,
    FeatureUnsupported,
    InvalidRequest,
    MedialaneError,
    PromptRejected,
    PromptTooLong,
    UnknownMedia,
    WorkerLost,
)
from medialane.types.feature import Feature, MediaPrompt, PlacedFeature, PlaceholderRange, PreparedPrompt, StagedItem
from medialane.types.hashing import merged_options
from medialane.types.kv_events import BlockIds
from medialane.types.media import MediaRef, audio_io
from medialane.types.request import Continuable, EngineRequest, OutputDelta
from medialane.types.stage import BEST_STAGE, RAW_STAGE, STAGES, Stage, StageChoice, StageName, prepared_stage
from medialane.types.stats import WaitStats

if TYPE_CHECKING:
    from medialane.routing import Router

logger = logging.getLogger(__name__)


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
        counts: SharedCounts | None = None,
        has_priorities: bool = False,
        plain: PlainHashes | None = None,
    ) -> None:
        """`counts` are what the gateways of a port count together. With `has_priorities`, engines are scheduled by
        priority (vLLM's --scheduling-policy). The hashes of prompts are those of `plain`, if it is given."""
        self._config = config
        self._transports = transports
        self._features = features
        self._assembly = Assembly(assembler)
        self._client_features = ClientFeatures(config, features, self._assembly)
        self._accepts_item_options = assembler.accepts_item_options
        self._fallback_stages = assembler.fallback_stages
        self._workers = workers
        self.routes = Routes(router, workers, metrics)
        self._metrics = metrics
        self._encoders = encoders
        self._sender = Sender(
            config=config,
            transports=transports,
            features=features,
            workers=workers,
            routes=self.routes,
            metrics=metrics,
            encoder_ms_per_token=router.config.encoder_ms_per_token,
            stage_for=self._stage_for,
        )
        self._generation = Generation(self._sender)
        self._admission = Admission(config.max_requests, tenant_share=config.tenant_share)
        self.queues: Queues | None = None
        self._has_priorities = has_priorities
        self._plain = plain
        if config.queue_requests:
            self.queues = Queues(
                config,
                router,
                metrics,
                preparers=lambda: features.preparers,
                counts=counts,
                has_priorities=has_priorities,
            )

    def fail(self, error: MedialaneError) -> None:
        """Record `error` as the response to the current request."""
        current_scope().fail(error)

    def resolve(self, url: str) -> MediaRef:
        return current_scope().resolve(url)

    def original_url(self, url: str) -> str:
        return current_scope().resolve(url).client_url

    @while_connected
    async def by_uuid(self, url: str) -> MediaRef:
        scope = current_scope()
        self._admission.admit(scope)
        return await self._features.resolve(scope.resolve(url))

    def admit(self, scope: RequestScope) -> None:
        """Count a request with media until its scope ends. Raises MediaOverloaded."""
        self._admission.admit(scope)

    async def num_image_tokens(self, size: tuple[int, int]) -> int | None:
        """Return how many tokens of a prompt an image of this size takes at least; None if that is not known."""
        cost = await self._assembly.image_cost(size, b"{}")
        return None if cost is None else cost.num_tokens

    def check_ready(self) -> None:
        if not self._config.render_only:
            self._workers.check_ready()

    @property
    def text_bytes(self) -> int | None:
        return current_scope().extracted.text_bytes

    @while_connected
    async def prepare(self, prompt: MediaPrompt, *, with_tensors: bool = False) -> PreparedPrompt:
        """Look up or prepare what the prompt's stage sends; for a processed stage, also expand the placeholders.
        `with_tensors`, embeddings do not replace the tensors of items.

        The result refers to the media, whose leases end with the request's scope. Raises MedialaneError.
        """
        scope = current_scope()
        self._admission.admit(scope)
        return await self._hashed(prompt, scope, partial(self._prepare, with_tensors=with_tensors))

    @while_connected
    async def describe(self, prompt: MediaPrompt) -> PreparedPrompt:
        """As `prepare`, but nothing is processed where headers are known from the size of the media."""
        scope = current_scope()
        self._admission.admit(scope)
        return await self._hashed(prompt, scope, partial(self._prepare, describes=True))

    def tensors(self, feature: Feature) -> list[memoryview]:
        return self._features.tensors(feature)

    @asynccontextmanager
    async def sending(self, num_bytes: int) -> AsyncGenerator[None]:
        scope = current_scope()
        limit_s = self._config.body_seconds(num_bytes)
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError as error:
            logger.warning("a client has not read %d bytes of tensors in %g s: it is disconnected", num_bytes, limit_s)
            scope.fail(ClientTooSlow("the response was read too slowly"))
            raise ClientDisconnected("the response was read too slowly") from error

    @while_connected
    async def refer(self, prepared: PreparedPrompt) -> list[str]:
        scope, options = current_scope(), prepared.source.options
        for ref in prepared.source.items:
            await self._features.refer(ref, options, scope.timeline, ImageBudget(self._assembly, options))
        return [f"{FEATURE_SCHEME}{placed.feature.mm_hash}" for placed in prepared.features]

    @while_connected
    async def find_feature(self, ref: MediaRef, *, with_tensors: bool = False) -> StagedItem:
        scope = self._admitted()
        item = await self._client_features.find(ref, scope, encoder="" if with_tensors else self._encoder)
        if item.feature.modality != ref.modality:
            raise UnknownMedia("unknown or expired feature: send its tensors or media", param=ref.param)
        return item

    @while_connected
    async def named_feature(self, mm_hash: str, salt: str) -> Feature:
        scope = self._admitted()
        ref = scope.owned(MediaRef("image", "mm_hash", content=mm_hash, salt=salt, is_feature=True))
        return (await self._client_features.find(ref, scope)).feature

    @while_connected
    async def put_feature(self, ref: MediaRef, item: ProcessedItem) -> StagedItem:
        return await self._client_features.put(ref, item, self._admitted())

    @while_connected
    async def place(
        self, token_ids: list[int], items: Sequence[StagedItem], ranges: Sequence[PlaceholderRange]
    ) -> PreparedPrompt:
        source = expanded_prompt(token_ids, items)
        media = RequestMedia(source, self._features, self._admitted(), self._assembly, encoder=self._encoder)
        media.have(BEST_STAGE, items)
        return await self._client_features.place(token_ids, items, ranges, media)

    def _admitted(self) -> RequestScope:
        scope = current_scope()
        self._admission.admit(scope)
        self._begin(scope)
        return scope

    def _begin(self, scope: RequestScope) -> None:
        if self.queues is not None and scope.preparation is None:
            scope.preparation = self.queues.preparation(scope)

    @property
    def _encoder(self) -> str:
        """The digest of the encoder whose embeddings replace tensors; empty if none do."""
        return self.routes.encoder if self._transports.carry_embeddings else ""

    async def _hashed(
        self,
        prompt: MediaPrompt,
        scope: RequestScope,
        make: Callable[[MediaPrompt, RequestScope], Awaitable[PreparedPrompt]],
    ) -> PreparedPrompt:
        if self._plain is None:
            return await make(prompt, scope)
        media = RequestMedia(prompt, self._features, scope, self._assembly)
        prompt, fetched = await self._plain.fetched(media)
        return await self._plain.named(await make(prompt, scope), media, fetched)

    async def _prepare(
        self, prompt: MediaPrompt, scope: RequestScope, *, with_tensors: bool = False, describes: bool = False
    ) -> PreparedPrompt:
        self._begin(scope)
        prompt = _with_common_options(prompt)
        stage = prepared_stage(self._stage_for(prompt))
        if stage.is_processed and stage.instead and self._instead(prompt):
            stage = STAGES[stage.instead]
        if not (stage.is_processed and self._accepts_item_options):
            _check_options(prompt)
        encoder = "" if with_tensors else self._encoder
        media = RequestMedia(prompt, self._features, scope, self._assembly, encoder=encoder)
        try:
            return await self._prepared(prompt, stage, media, scope, describes=describes and stage.is_processed)
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
        self, prompt: MediaPrompt, stage: Stage, media: RequestMedia, scope: RequestScope, *, describes: bool = False
    ) -> PreparedPrompt:
        items = await (media.described() if describes else media.in_stage(stage.name))
        mm_hashes = tuple(item.feature.mm_hash for item in items)
        if not stage.is_processed:
            scope.record.prepared(items, is_reported=scope.wants_report)
            encoder_token_ids = prompt.token_ids if prompt.is_encoder_prompt else None
            return PreparedPrompt(prompt.token_ids, (), mm_hashes, prompt, media, encoder_token_ids)
        features = tuple(item.feature for item in items)
        with scope.timeline.measure("assemble"):
            assembled = await self._assembly.assemble(prompt, features)
        num_tokens = [place.num_embeds for place in assembled.placeholders]
        scope.record.prepared(items, num_tokens, is_reported=scope.wants_report)
        placed = tuple(map(PlacedFeature, features, assembled.placeholders))
        is_predicted = all(item.is_hit is None for item in items)
        encoder_token_ids = assembled.encoder_token_ids
        return PreparedPrompt(assembled.token_ids, placed, mm_hashes, prompt, media, encoder_token_ids, is_predicted)

    @while_connected
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

    @while_connected
    async def publish_images(self, _parameters: Mapping[str, str] | None = None) -> bytes:
        """Decode and publish the images of the current request for RDMA reads."""
        scope = current_scope()
        self._admission.admit(scope)
        refs = scope.extracted.refs
        if not refs or any(ref.modality != "image" or ref.is_embeds or ref.is_feature for ref in refs):
            raise InvalidRequest("the request must have images, and no other media", param="messages")
        resolved = MediaPrompt([], tuple([await self._features.resolve(ref) for ref in refs]))
        items = await RequestMedia(resolved, self._features, scope, self._assembly).in_stage("decoded")
        images = [await self._features.publish(item.feature.tensors[0].range) for item in items]
        return b'{"images":[%b]}' % b",".join(images)

    async def generate(
        self, request: EngineRequest, prepared: PreparedPrompt | None, continuable: Continuable | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Generate at the best worker, its media transferred by the first transfer path that works; at another worker
        if that is lost, where an answer that has begun goes on if it is `continuable`.

        `prepared` is the result of `prepare`, None for text. Closing the generator aborts the request at the worker.
        Raises MedialaneError.
        """
        scope, block_ids = current_scope(), dict[int, BlockIds]()
        request = msgspec.structs.replace(request, cache_salt=scope.salt(request.cache_salt))
        try:
            prepared = await self._with_embeddings(request, prepared, scope, block_ids)
            request = self._prioritized(request, scope)
            ticket = await self._ticket(request, prepared, scope)
            call = self._sender.route(request, prepared, scope, continuable=continuable, block_ids=block_ids)
            call = call._replace(ticket=ticket)
            async with aclosing(self._generation.answer(call)) as deltas:
                async for delta in deltas:
                    yield delta
        except MedialaneError as error:
            # If a worker's vLLM rejected the prompt, the app responds as if its own vLLM had.
            scope.fail(self._for_client(error), app_responds=isinstance(error, PromptRejected))
            raise

    async def administer(self, call: AdminCall) -> list[AdminResult]:
        """Execute `call` in every worker's engine. Raises what `administration.administer` raises."""
        return await administer(self._workers, call, timeout_s=self._config.admin_timeout_s)

    def waits(self) -> WaitStats:
        """Return how long requests are expected to wait, for /metrics."""
        waits = self.routes.waits()
        if self.queues is None or waits.expected_s is None:
            return waits
        return msgspec.structs.replace(waits, expected_s=waits.expected_s + self.queues.stats()["engine"].oldest_s)

    def close(self) -> None:
        self._assembly.close()
        if self._plain is not None:
            self._plain.close()

    def _prioritized(self, request: EngineRequest, scope: RequestScope) -> EngineRequest:
        """Return the request with the most urgent priority that its tenant may have, at most."""
        if scope.tenant is None or not self._has_priorities:
            return request
        return msgspec.structs.replace(request, priority=scope.tenant.priority(request.priority))

    @while_connected
    async def _ticket(
        self, request: EngineRequest, prepared: PreparedPrompt | None, scope: RequestScope
    ) -> Ticket | None:
        """Wait until the request may be sent to an engine. Raises NoWorkerReady, QueueFull, QueueTimeout."""
        if self.queues is None:
            return None
        if scope.preparation is not None:
            scope.preparation.end()
        self.check_ready()
        return await self.queues.engine(scope, len(request.prompt.token_ids), has_media=prepared is not None)

    def _for_client(self, error: MedialaneError) -> MedialaneError:
        """How a worker was lost is no matter of the client, but when there will be one again."""
        if not isinstance(error, WorkerLost):
            return error
        is_out = not self._workers.num_ready
        return WorkerLost(error.message, retry_after_s=self._workers.retry_after_s if is_out else error.retry_after_s)

    @while_connected
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
        scope.timeline.enter("encode")
        headers = None if scope.trace is None else scope.trace.headers
        encoded = await self._encoders.encode(prepared, new, digest, scope.record, trace_headers=headers)
        if not encoded:
            return prepared
        features = await prepared.media.with_embeddings(encoded)
        placed = map(PlacedFeature, features, [placed.placeholder for placed in prepared.features])
        return msgspec.structs.replace(prepared, features=tuple(placed))

    def _stage_for(self, prompt: MediaPrompt) -> StageChoice:
        if any(ref.is_feature for ref in prompt.items):
            return BEST_STAGE
        is_raw = self._config.stage == "auto" and RAW_STAGE in self._instead(prompt)
        return RAW_STAGE if prompt.has_embeds or is_raw else self._config.stage

    def _instead(self, prompt: MediaPrompt) -> set[StageName]:
        """Return the stages that items of the prompt need instead of the first."""
        modalities = {item.modality for item in prompt.items}
        return {stage for modality, stage in self._fallback_stages.items() if modality in modalities}


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


def _check_options(prompt: MediaPrompt) -> None:
    """Raise InvalidRequest if an item has options that other items do not share."""
    own = next((ref for ref in prompt.items if ref.options != b"{}"), None)
    if own is not None:
        message = "with this model and stage all items of a request must have the same min_pixels and max_pixels"
        raise InvalidRequest(message, param=own.param)
