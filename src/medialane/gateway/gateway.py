"""The story of a request: prepare, route, hand over, stream, release."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from medialane.core.admin import AdminCall, AdminResult
from medialane.core.errors import (
    GenerationFailed,
    HandoverFailed,
    InvalidRequest,
    MedialaneError,
    NoWorkerReady,
    PromptRejected,
    PromptTooLong,
)
from medialane.core.feature import MediaPrompt, PlacedFeature, PreparedPrompt
from medialane.core.hashing import merged_options
from medialane.core.media import MediaRef
from medialane.core.request import EngineRequest, OutputDelta, Prompt
from medialane.gateway.administration import Administration
from medialane.gateway.admission import Admission
from medialane.gateway.assembly import Assembly
from medialane.gateway.config import GatewayConfig
from medialane.gateway.features import FeatureSource, Found
from medialane.gateway.handover import Handover, Pins
from medialane.gateway.report import Cache
from medialane.gateway.route import Route, Routes
from medialane.gateway.scope import RequestScope, current_scope
from medialane.gateway.side_by_side import side_by_side
from medialane.gateway.source_entry import SourceStage
from medialane.gateway.workers import WorkerLink, WorkerPool
from medialane.observability.metrics import Metrics
from medialane.prepare import Assembler
from medialane.rpc import RemoteRequest
from medialane.transfer import TransferConfig, Way, ways

if TYPE_CHECKING:
    from medialane.routing import Router

logger = logging.getLogger(__name__)


class Gateway:
    """What vllm_bridge's app calls, twice a request: `prepare` when it renders, `generate` when it generates."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        transfer: TransferConfig,
        features: FeatureSource,
        handover: Handover,
        assembler: Assembler,
        workers: WorkerPool,
        router: Router,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._transfer = transfer
        self._features = features
        self._handover = handover
        self._assembly = Assembly(assembler)
        self._takes_own_options = assembler.takes_own_options
        self._workers = workers
        self.routes = Routes(router, workers, metrics)
        self._administration = Administration(
            workers, timeout_s=config.admin_timeout_s, forget_encoder_items=self.routes.forget_encoder_items
        )
        self._metrics = metrics
        self._num_sent = 0
        # A worker has several gateways, and clients may choose request ids: ours say who sent it, and which attempt.
        self._sender = secrets.token_hex(4)
        self._admission = Admission(config.max_requests)

    def fail(self, error: MedialaneError) -> None:
        """Remember that the current request is answered with `error`."""
        current_scope().fail(error)

    def resolve(self, url: str) -> MediaRef:
        return self._features.known(current_scope().resolve(url))

    @property
    def ready(self) -> bool:
        return self._workers.num_ready > 0

    async def prepare(self, prompt: MediaPrompt) -> PreparedPrompt:
        """Make features of the prompt's items and expand its placeholders. The request's scope holds the leases."""
        scope = current_scope()
        scope.take(self._admission.enter())
        prompt = _with_common_options(prompt)
        if (stage := self._source_stage(prompt)) is not None:
            return await self._leave_to_worker(prompt, stage, scope)
        if not self._takes_own_options:
            _check_options(prompt)
        try:
            found = await side_by_side([self._find(ref, prompt.options, scope) for ref in prompt.items])
        except PromptTooLong as error:
            scope.fail(error, app_answers=True)
            raise
        features = tuple(item.lease.value for item in found)
        with scope.timeline.measure("assemble"):
            assembled = await self._assembly.assemble(prompt, features)
        for ref, item, place in zip(prompt.items, found, assembled.placeholders, strict=True):
            media = item.lease.value
            scope.note_item(
                ref, mm_hash=media.mm_hash, cache=_cache(item.is_hit), size=media.size, num_tokens=place.num_embeds
            )
        return PreparedPrompt(
            token_ids=assembled.token_ids,
            features=tuple(map(PlacedFeature, features, assembled.placeholders)),
            mm_hashes=tuple(f.mm_hash for f in features),
            source=prompt,
        )

    async def generate(
        self, request: EngineRequest, prepared: PreparedPrompt | None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Answer `request` at the best worker, its media handed over in the first way that works.

        `prepared` is what `prepare` gave, None for text. Closing the generator aborts the request at the worker.
        Raises MedialaneError.
        """
        scope = current_scope()
        try:
            async with aclosing(self._answer(request, prepared, scope)) as deltas:
                async for delta in deltas:
                    yield delta
        except MedialaneError as error:
            # What a worker's vLLM has refused, the app answers as if its own had.
            scope.fail(error, app_answers=isinstance(error, PromptRejected))
            raise

    async def administer(self, call: AdminCall) -> list[AdminResult]:
        """Have every worker's engine do `call`. Raises as `Administration.administer`."""
        return await self._administration.administer(call)

    def close(self) -> None:
        self._assembly.close()

    async def _answer(
        self, request: EngineRequest, prepared: PreparedPrompt | None, scope: RequestScope
    ) -> AsyncGenerator[OutputDelta, None]:
        with scope.timeline.measure("route"):
            route = self.routes.choose(request, prepared)
            scope.take(route.routed)
            tries = self._ways(route.link, prepared)
        for way in tries:
            started = False
            scope.note_way(way.stage, way.transport)
            try:
                async with aclosing(self._attempt(request, prepared, way, route, scope)) as deltas:
                    async for delta in deltas:
                        started = True
                        yield delta
            except HandoverFailed as error:
                logger.warning("handing over to %s by %s failed: %s", route.link.address, way, error.message)
                if started or way is tries[-1]:
                    raise GenerationFailed("the request's media could not be handed over to a worker") from error
                self._metrics.count_fallback(str(way), error.code)
            else:
                return

    def _begin(self, route: Route, request: EngineRequest, scope: RequestScope) -> None:
        with scope.timeline.measure("route"):
            self.routes.begin(route, request.request_id)
            scope.note_route(route.routed.decision)

    def _source_stage(self, prompt: MediaPrompt) -> SourceStage | None:
        """The stage of a prompt whose items a worker shall process. Embeddings are what they are: there is nothing to
        prepare, and only the worker's vLLM puts them into a prompt."""
        if _has_embeds(prompt):
            return "url"
        stage = self._config.stage
        return stage if stage in ("decoded", "url") else None

    async def _leave_to_worker(self, prompt: MediaPrompt, stage: SourceStage, scope: RequestScope) -> PreparedPrompt:
        """Stages `decoded` and `url`: what is fetched and decoded here, under our guard, is in the arena from now on;
        the worker does the rest."""
        _check_options(prompt)
        entries = await side_by_side(
            [self._handover.entry(stage, number, prompt, scope) for number in range(len(prompt.items))]
        )
        for entry in entries:
            scope.note_item(entry.ref, mm_hash=entry.mm_hash, cache=_cache(entry.is_hit), size=entry.size)
        return PreparedPrompt(prompt.token_ids, (), tuple(entry.mm_hash for entry in entries), prompt)

    async def _find(self, ref: MediaRef, options: bytes, scope: RequestScope) -> Found:
        found = await self._features.find(ref, options, scope.timeline)
        scope.take(found.lease)
        scope.features[found.lease.value.mm_hash] = found.lease
        return found

    def _ways(self, link: WorkerLink, prepared: PreparedPrompt | None) -> Sequence[Way]:
        if prepared is None:
            return (Way("features", "inline"),)
        found = ways(
            "url" if _has_embeds(prepared.source) else self._config.stage,
            self._transfer.transport,
            same_host=link.same_host,
            same_processor=link.same_processor,
            prepared=bool(prepared.features),
        )
        if not found:
            raise NoWorkerReady("no worker takes media the way that --stage and --transport ask for (see the log)")
        return found

    async def _attempt(
        self, request: EngineRequest, prepared: PreparedPrompt | None, way: Way, route: Route, scope: RequestScope
    ) -> AsyncGenerator[OutputDelta, None]:
        """Send the request by `way` and stream its answer."""
        timeline = scope.timeline
        self._num_sent += 1
        with timeline.measure("handover"):
            prompt: Prompt = request.prompt
            pins = Pins()
            if prepared is not None and way.stage == "features":
                prompt, pins = self._handover.expanded(way, request.prompt.token_ids, prepared, scope)
            elif prepared is not None:
                self._begin(route, request, scope)  # others may be routed while its media are found
                prompt, pins = await self._handover.source(way, request.prompt.token_ids, prepared, scope)
            request_id = f"{request.request_id}#{self._sender}-{self._num_sent}"
            sent = msgspec.structs.replace(
                request, request_id=request_id, prompt=prompt, data_parallel_rank=route.data_parallel_rank
            )
            remote = route.link.submit(sent, pins.until_released, pins.until_sent)
        self._begin(route, request, scope)
        # A stream that vLLM's app drops without closing it ends with the scope, not when it is collected.
        scope.take(_Aborting(remote))
        sent_at = time.perf_counter()
        try:
            async for delta in remote:
                if "first_token" not in timeline.seconds:
                    timeline.add("first_token", time.perf_counter() - sent_at)
                    self.routes.answered(route, prepared, delta)
                    scope.note_cached(delta.num_cached_tokens)
                if delta.times is not None:
                    timeline.add("queue", delta.times.queue_s)
                    timeline.add("prefill", delta.times.prefill_s)
                yield delta
        finally:
            remote.abort()


class _Aborting:
    """A request under way as a resource of its scope."""

    def __init__(self, remote: RemoteRequest) -> None:
        self._remote = remote

    def release(self) -> None:
        self._remote.abort()


def _cache(is_hit: bool | None) -> Cache:
    if is_hit is None:
        return "none"
    return "hit" if is_hit else "miss"


def _has_embeds(prompt: MediaPrompt) -> bool:
    return any(ref.is_embeds for ref in prompt.items)


def _with_common_options(prompt: MediaPrompt) -> MediaPrompt:
    """Options that all items have in common are the request's: then every stage and every family can honour them."""
    found = {merged_options(prompt.options, ref.options) for ref in prompt.items if not ref.is_embeds}
    if len(found) != 1:
        return prompt
    items = tuple(msgspec.structs.replace(ref, options=b"{}") for ref in prompt.items)
    return msgspec.structs.replace(prompt, items=items, options=found.pop())


def _check_options(prompt: MediaPrompt) -> None:
    """Raise InvalidRequest where an item has options of its own that others do not share."""
    own = next((ref for ref in prompt.items if ref.options != b"{}"), None)
    if own is not None:
        message = "with this model and stage all items of a request must have the same min_pixels and max_pixels"
        raise InvalidRequest(message, param=own.param)
