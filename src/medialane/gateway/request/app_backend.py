"""What vLLM's app calls: for a request, whose media are prepared before it is run (`run`), and for administration
(`administer`), whose calls go to all workers."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from medialane.gateway.admission import Admission, Queues, SharedCounts
from medialane.gateway.config import GatewayConfig
from medialane.gateway.encoders import Encoders
from medialane.gateway.intake import placeholder_field
from medialane.gateway.intake.documents import text_of
from medialane.gateway.intake.places import FEATURE_SCHEME
from medialane.gateway.request.assembly import Assembly, ImageBudget
from medialane.gateway.request.dispatch import Dispatcher
from medialane.gateway.request.handover_paths import Transports
from medialane.gateway.request.media import PlainHashes, RequestMedia, keep
from medialane.gateway.request.route import Routes
from medialane.gateway.request.run import RequestRunner
from medialane.gateway.request.scope import RequestScope, current_scope, while_connected
from medialane.gateway.request.store_items import StoreItems, wave_size
from medialane.gateway.workers.link import WorkerLink
from medialane.gateway.workers.pool import WorkerPool
from medialane.observability.metrics import Metrics
from medialane.observability.timeline import RequestTimeline
from medialane.prepare import Assembler
from medialane.prepare.processor import ProcessedItem
from medialane.runtime.tasks import gather_or_cancel
from medialane.types.admin import AddLora, AdminCall, AdminResult, UnloadLora, changes_encoder, concerns_encoders
from medialane.types.errors import (
    AdminCallIncomplete,
    ClientDisconnected,
    ClientTooSlow,
    FeatureUnsupported,
    InvalidFeature,
    InvalidRequest,
    MedialaneError,
    NoWorkerReady,
    PromptTooLong,
    UnknownMedia,
)
from medialane.types.feature import (
    Feature,
    MediaPrompt,
    PlacedFeature,
    PlaceholderRange,
    PreparedPrompt,
    StagedItem,
)
from medialane.types.hashing import merged_options
from medialane.types.media import (
    BEST_STAGE,
    RAW_STAGE,
    STAGES,
    TEXT_TYPE,
    DocumentOptions,
    MediaRef,
    OpenedDocument,
    Stage,
    StageChoice,
    StageName,
    audio_io,
    naming,
    prepared_stage,
)
from medialane.types.stats import WaitStats

if TYPE_CHECKING:
    from medialane.routing import Router


logger = logging.getLogger(__name__)

#: A4 at 600 dpi: of no page does a model use more pixels than of this one.
_LARGE_PAGE = (4960, 7016)

#: Pixels of a page for each that a model uses of it, unless a request says otherwise. A model with a square input uses
#: the whole short side, and crops or squeezes the long one: a page may be twice as long as wide. Models with tiles use
#: more of some shapes than of others, but less than twice as many; and one that only scales a page down gets sharper
#: letters from more pixels than it uses.
_PIXELS_PER_USED = 2

#: Workers that an error names; the others are in the log.
MAX_NAMED = 8


class AppBackend:
    """What vLLM's app calls (`vllm_bridge.frontend.request_backend`), up to twice per request: `prepare` for media,
    `generate` for generation."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        transports: Transports,
        store_items: StoreItems,
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
        priority (vLLM's --scheduling-policy). The hashes of prompts are computed by `plain`, if it is given."""
        self._config = config
        self._transports = transports
        self._store_items = store_items
        self._assembly = Assembly(assembler)
        self._has_features = config.stage in ("auto", BEST_STAGE)
        self._accepts_item_options = assembler.accepts_item_options
        self._unfit_stages = assembler.unfit_stages
        self._workers = workers
        self.routes = Routes(router, workers, metrics)
        self._metrics = metrics
        self._admission = Admission(config.max_requests, tenant_share=config.tenant_share)
        self.queues: Queues | None = None
        self._plain = plain
        if config.queue_requests:
            self.queues = Queues(
                config,
                router,
                metrics,
                preparers=lambda: store_items.preparers,
                counts=counts,
                has_priorities=has_priorities,
            )
        dispatcher = Dispatcher(
            config=config,
            transports=transports,
            store_items=store_items,
            workers=workers,
            routes=self.routes,
            metrics=metrics,
            queues=self.queues,
            stage_for=self._stage_for,
        )
        runner = RequestRunner(
            dispatcher, config=config, encoders=encoders, queues=self.queues, has_priorities=has_priorities
        )
        self.generate = runner.generate

    def has_next(self) -> bool:
        """Return whether an output of the request that the current one has sent last has arrived."""
        remote = current_scope().remote
        return remote is not None and remote.has_next

    def fail(self, error: MedialaneError) -> None:
        """Record `error` as the response to the current request."""
        current_scope().fail(error)

    def resolve(self, url: str) -> MediaRef:
        return current_scope().resolve(url)

    def original_url(self, url: str) -> str:
        ref = current_scope().resolve(url)
        return ref.client_url if ref.page is None else ref.param  # each page has all bytes of its document

    @while_connected
    async def by_uuid(self, url: str) -> MediaRef:
        scope = current_scope()
        self._admission.admit(scope)
        with scope.timeline.measure("store"):
            return await self._store_items.resolve(scope.resolve(url))

    def admit(self, scope: RequestScope) -> None:
        """Count a request with media until its scope ends. Raises MediaOverloaded."""
        self._admission.admit(scope)

    @while_connected
    async def open_document(self, ref: MediaRef, options: DocumentOptions) -> OpenedDocument:
        """Return a document of the current request with its pages. Raises MedialaneError, which names its field."""
        if ref.media_type == TEXT_TYPE:
            with naming(ref):
                return OpenedDocument("", 0, (), text_of(bytes(await self.read(ref))))
        self._admission.admit(current_scope())
        if not options.dpi and not options.max_pixels:  # more pixels would be rendered to be thrown away
            cost = await self._assembly.image_cost(_LARGE_PAGE, b"{}")
            most = 0 if cost is None else _PIXELS_PER_USED * cost.num_pixels
            options = msgspec.structs.replace(options, max_pixels=most)
        with naming(ref):
            return await self._store_items.open_document(ref, options)

    @while_connected
    async def read(self, ref: MediaRef) -> memoryview:
        """Return the bytes of media that the client has sent before, in the arena; the current request holds them."""
        item = await self._store_items.encoded(
            ref, b"{}", RequestTimeline(), ImageBudget(self._assembly, b"{}", self._admitted().preparation)
        )
        keep(item, current_scope())
        (data,) = self.tensors(item.feature)
        return data

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

    @property
    def salt(self) -> str | None:
        return current_scope().text_salt

    def rendering(self) -> AbstractContextManager[object]:
        return current_scope().timeline.measure("render")

    @while_connected
    async def prepare(self, prompt: MediaPrompt, *, with_tensors: bool = False) -> PreparedPrompt:
        """Look up or prepare what the prompt's stage sends; for a processed stage, also expand the placeholders.
        `with_tensors`, embeddings do not replace the tensors of items.

        The result refers to the media, whose holds end with the request's scope. Raises MedialaneError.
        """
        return await self._hashed(prompt, with_tensors=with_tensors)

    @while_connected
    async def describe(self, prompt: MediaPrompt) -> PreparedPrompt:
        """As `prepare`, but nothing is processed where headers are known from the size of the media."""
        return await self._hashed(prompt, describes=True)

    def tensors(self, feature: Feature) -> list[memoryview]:
        return self._store_items.tensors(feature)

    @asynccontextmanager
    async def sending(self, num_bytes: int) -> AsyncGenerator[None]:
        scope = current_scope()
        limit_s = self._config.body_seconds(num_bytes)
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError as error:
            logger.warning("a client has not read %d bytes in %g s: it is disconnected", num_bytes, limit_s)
            scope.fail(ClientTooSlow("the response was read too slowly"))
            raise ClientDisconnected("the response was read too slowly") from error

    @while_connected
    async def refer(self, prepared: PreparedPrompt) -> list[str]:
        scope, options = current_scope(), prepared.source.options
        for ref in prepared.source.items:
            with scope.timeline.measure("store"), scope.record.finding(ref) as timeline:
                await self._store_items.refer(ref, options, timeline, ImageBudget(self._assembly, options))
        return [f"{FEATURE_SCHEME}{placed.feature.mm_hash}" for placed in prepared.features]

    @while_connected
    async def find_feature(self, ref: MediaRef, *, with_tensors: bool = False) -> StagedItem:
        item = await self._named(ref, self._admitted(), encoder="" if with_tensors else self._encoder)
        if item.feature.modality != ref.modality:
            raise UnknownMedia("unknown or expired feature: send its tensors or media", param=ref.param)
        return item

    @while_connected
    async def named_feature(self, mm_hash: str, salt: str) -> Feature:
        scope = self._admitted()
        ref = scope.owned(MediaRef("image", "mm_hash", content=mm_hash, salt=salt, is_feature=True))
        return (await self._named(ref, scope)).feature

    @while_connected
    async def put_feature(self, ref: MediaRef, item: ProcessedItem) -> StagedItem:
        """Return the feature of tensors that a client has sent, under a key of ours."""
        scope = self._admitted()
        self._check_stage(ref)
        with scope.timeline.measure("store"), scope.record.finding(ref) as timeline:
            found = await self._store_items.put(ref, item, timeline)
        keep(found, scope)
        return found

    @while_connected
    async def place(
        self, token_ids: list[int], items: Sequence[StagedItem], ranges: Sequence[PlaceholderRange]
    ) -> PreparedPrompt:
        """Return the prompt of these items, each at its range, which says only where its placeholder is. Raises
        InvalidRequest unless the prompt has the placeholders of the items there."""
        source, scope = MediaPrompt(token_ids, tuple(item.ref for item in items)), self._admitted()
        media = RequestMedia(source, self._store_items, scope, self._assembly, encoder=self._encoder)
        media.have(BEST_STAGE, items)
        features = tuple(item.feature for item in items)
        try:
            placed = await self._assembly.place(token_ids, features, ranges)
        except InvalidFeature as error:
            raise error.at("features") from error
        for item, given, place in zip(items, ranges, placed, strict=True):
            if place is None:
                message = f"the prompt's {given.length} tokens at {given.offset} do not belong to this item"
                raise InvalidRequest(message, param=placeholder_field(item.ref))
        places = [place for place in placed if place is not None]
        scope.record.prepared(items, [place.num_embeds for place in places])
        mm_hashes = tuple(feature.mm_hash for feature in features)
        return PreparedPrompt(token_ids, tuple(map(PlacedFeature, features, places)), mm_hashes, source, media)

    async def _named(self, ref: MediaRef, scope: RequestScope, *, encoder: str = "") -> StagedItem:
        """Return the feature that the client of `ref` names, made again if it was evicted. Raises UnknownMedia."""
        self._check_stage(ref)
        named = msgspec.structs.replace(ref, data=None)
        budget = ImageBudget(self._assembly, b"{}", scope.preparation)
        with scope.timeline.measure("store"), scope.record.finding(ref) as timeline:
            item = await self._store_items.processed(named, b"{}", timeline, budget, encoder=encoder)
        keep(item, scope)
        return item

    def _check_stage(self, ref: MediaRef) -> None:
        if not self._has_features:
            raise InvalidRequest("features are not used by this server (--stage): send the media", param=ref.param)

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
        return self._workers.encoder if self._transports.carry_embeddings else ""

    async def _hashed(
        self, prompt: MediaPrompt, *, with_tensors: bool = False, describes: bool = False
    ) -> PreparedPrompt:
        scope = current_scope()
        self._admission.admit(scope)
        if self._plain is None:
            return await self._prepare(prompt, scope, with_tensors=with_tensors, describes=describes)
        media = RequestMedia(prompt, self._store_items, scope, self._assembly)
        prompt, fetched = await self._plain.fetched(media)
        prepared = await self._prepare(prompt, scope, with_tensors=with_tensors, describes=describes)
        return await self._plain.named(prepared, media, fetched)

    async def _prepare(
        self, prompt: MediaPrompt, scope: RequestScope, *, with_tensors: bool, describes: bool
    ) -> PreparedPrompt:
        self._begin(scope)
        prompt = _with_common_options(prompt)
        stage = prepared_stage(self._stage_for(prompt))
        if stage.is_processed and stage.if_unsupported and self._stages_of_unfit(prompt):
            stage = STAGES[stage.if_unsupported]
        if not (stage.is_processed and self._accepts_item_options):
            _check_options(prompt)
        encoder = "" if with_tensors else self._encoder
        media = RequestMedia(prompt, self._store_items, scope, self._assembly, encoder=encoder)
        try:
            return await self._prepared(prompt, stage, media, scope, describes=describes and stage.is_processed)
        except PromptTooLong as error:
            scope.fail(error, app_responds=True)
            raise
        except FeatureUnsupported as error:
            if self._config.stage != "auto" or stage.if_unsupported is None:
                raise
            logger.warning("a request is sent in stage %s, not %s: %s", stage.if_unsupported, stage.name, error.message)
            self._metrics.handover_fallbacks.labels(stage.name, error.code).inc()
            _check_options(prompt)
            return await self._prepared(prompt, STAGES[stage.if_unsupported], media, scope)

    async def _prepared(
        self, prompt: MediaPrompt, stage: Stage, media: RequestMedia, scope: RequestScope, *, describes: bool = False
    ) -> PreparedPrompt:
        with scope.timeline.measure("store"):
            items = await (media.described() if describes else media.in_stage(stage.name))
        mm_hashes = tuple(item.feature.mm_hash for item in items)
        if not stage.is_processed:
            scope.record.prepared(items)
            encoder_token_ids = prompt.token_ids if prompt.is_encoder_prompt else None
            return PreparedPrompt(prompt.token_ids, (), mm_hashes, prompt, media, encoder_token_ids)
        features = tuple(item.feature for item in items)
        with scope.timeline.measure("assemble"):
            assembled = await self._assembly.assemble(prompt, features)
        num_tokens = [place.num_embeds for place in assembled.placeholders]
        scope.record.prepared(items, num_tokens)
        placed = tuple(map(PlacedFeature, features, assembled.placeholders))
        is_predicted = all(item.is_hit is None for item in items)
        encoder_token_ids = assembled.encoder_token_ids
        return PreparedPrompt(assembled.token_ids, placed, mm_hashes, prompt, media, encoder_token_ids, is_predicted)

    @while_connected
    async def decode_audio(self, url: str, sample_rate: int) -> bytes:
        scope = current_scope()
        self._admission.admit(scope)
        ref = msgspec.structs.replace(scope.resolve(url), io=audio_io(sample_rate))
        media = RequestMedia(MediaPrompt([], (ref,)), self._store_items, scope, self._assembly)
        with scope.timeline.measure("store"):
            (item,) = await media.in_stage("decoded")
        _charge(scope, wave_size(item.feature.size.num_samples))
        return await self._store_items.wave(self._store_items.samples(item.feature), sample_rate)

    async def audio(self, samples: NDArray[np.float32], sample_rate: int) -> MediaRef:
        scope = current_scope()
        _charge(scope, wave_size(samples.size))
        data = await self._store_items.wave(samples, sample_rate)
        return msgspec.structs.replace(scope.extracted.refs[0], data=data)

    @while_connected
    async def publish_images(self, _parameters: Mapping[str, str] | None = None) -> bytes:
        """Decode and publish the images of the current request for RDMA reads."""
        scope = current_scope()
        self._admission.admit(scope)
        refs = scope.extracted.refs
        if not refs or any(ref.modality != "image" or ref.is_embeds or ref.is_feature for ref in refs):
            raise InvalidRequest("the request must have images, and no other media", param="messages")
        resolved = MediaPrompt([], tuple([await self._store_items.resolve(ref) for ref in refs]))
        items = await RequestMedia(resolved, self._store_items, scope, self._assembly).in_stage("decoded")
        images = [await self._store_items.publish(item.feature.tensors[0].range) for item in items]
        return b'{"images":[%b]}' % b",".join(images)

    async def administer(self, call: AdminCall) -> list[AdminResult]:
        """Execute `call` in every worker's engine. Raises what the function `administer` raises."""
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

    def _stage_for(self, prompt: MediaPrompt) -> StageChoice:
        if any(ref.is_feature for ref in prompt.items):
            return BEST_STAGE
        is_raw = self._config.stage == "auto" and RAW_STAGE in self._stages_of_unfit(prompt)
        return RAW_STAGE if prompt.has_embeds or is_raw else self._config.stage

    def _stages_of_unfit(self, prompt: MediaPrompt) -> set[StageName]:
        """Return the stages that items of the prompt need instead of the first."""
        modalities = {item.modality for item in prompt.items}
        return {stage for modality, stage in self._unfit_stages.items() if modality in modalities}


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


async def administer(workers: WorkerPool, call: AdminCall, *, timeout_s: float) -> list[AdminResult]:
    """Execute `call` at every worker and return their results, in the configured order of the workers. What it does to
    caches is reported by the workers, to all their gateways.

    Raises the workers' InvalidRequest if all reject the call with the same error, AdminCallIncomplete naming the
    workers that have not executed it (lost workers included), NoWorkerReady if no worker can load an adapter.
    """
    links = _called_links(workers, call)
    if changes_encoder(call):
        call = msgspec.structs.replace(call, salt=secrets.token_hex(16))
    results = await gather_or_cancel([_admin_result(link, call, timeout_s) for link in links])
    failed = {link: error for link, error in zip(links, results, strict=True) if isinstance(error, MedialaneError)}
    if failed:
        for link, error in failed.items():
            logger.warning("%s at worker %s: %s", type(call).__name__, link.name, error.message)
        raise _admin_error(failed, links)
    return [result for result in results if not isinstance(result, MedialaneError)]


def _called_links(workers: WorkerPool, call: AdminCall) -> Sequence[WorkerLink]:
    """Return all workers; for adapters, the connected ones: others have none, and load one with the first request that
    names it. Of encoders, the connected ones: a lost one has no state to be changed."""
    links = workers.of_role("worker")
    if isinstance(call, AddLora | UnloadLora):
        links = [link for link in links if link.client is not None]
    if not links:
        raise NoWorkerReady("no worker is ready", retry_after_s=5)
    if concerns_encoders(call):
        links += [link for link in workers.of_role("encoder") if link.client is not None]
    return links


async def _admin_result(link: WorkerLink, call: AdminCall, timeout_s: float) -> AdminResult | MedialaneError:
    client = link.client
    if client is None:
        return NoWorkerReady("not connected")
    try:
        return await client.calls.administer(call, timeout_s)
    except MedialaneError as error:
        return error


def _admin_error(failed: Mapping[WorkerLink, MedialaneError], called: Sequence[WorkerLink]) -> MedialaneError:
    first = next(iter(failed.values()))
    same = all(type(error) is type(first) and error.message == first.message for error in failed.values())
    if same and len(failed) == len(called) and isinstance(first, InvalidRequest):
        return first
    named = [f"{link.name} ({error.message})" for link, error in list(failed.items())[:MAX_NAMED]]
    more = f" and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
    done = len(called) - len(failed)
    return AdminCallIncomplete(f"{done} of {len(called)} workers executed the call; failed: {'; '.join(named)}{more}")
