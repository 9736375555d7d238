"""Routes requests: what the router gets of a request, of workers, and of the engine's first output."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from medialane.gateway.records import EmbeddingOutcome, embedding_outcome
from medialane.gateway.request.expansions import Expansions, Item, PromptPrefix
from medialane.gateway.workers.client import RpcClient
from medialane.gateway.workers.link import WorkerLink
from medialane.gateway.workers.pool import WorkerPool
from medialane.observability.metrics import Metrics
from medialane.routing import RoutedRequest, Router, RoutingRequest
from medialane.types.feature import MediaSpan, PlacedFeature, PreparedPrompt
from medialane.types.kv_blocks import BlockIds, prompt_block_ids, token_array
from medialane.types.request import EngineRequest, OutputDelta
from medialane.types.stats import RoutingStats, WaitStats

logger = logging.getLogger(__name__)


class Route(NamedTuple):
    """The worker of one request, and the connection to it at that time. `routed` reports the request's progress to the
    router; the request's scope owns it."""

    link: WorkerLink
    client: RpcClient | None
    routed: RoutedRequest
    prefix: PromptPrefix
    data_parallel_rank: int | None

    def num_prompt_tokens(self, first: OutputDelta) -> int:
        """Return how many tokens the prompt has, by its first output."""
        if first.prompt_token_ids is not None:
            return len(first.prompt_token_ids)
        return self.routed.decision.num_tokens


class Routes:
    """Chooses workers for requests, reports workers to the router, and learns expansions from the engines' outputs."""

    def __init__(self, router: Router, workers: WorkerPool, metrics: Metrics) -> None:
        self.encoder_ms_per_token = router.config.encoder_ms_per_token
        self._router = router
        self._workers = workers
        self._metrics = metrics
        self._expansions = Expansions()
        workers.route_by(router)

    def choose(
        self,
        request: EngineRequest,
        prepared: PreparedPrompt | None,
        excluded: frozenset[str] = frozenset(),
        *,
        block_ids: dict[int, BlockIds] | None = None,
    ) -> Route:
        """Return the worker for a request, none of the addresses `excluded`. The router counts the request from `begin`
        on. `block_ids` were computed for this prompt by `new_items`. Raises NoWorkerReady."""
        prefix = self._prefix(request, prepared)
        if request.generated and not prefix.unplaced_items:
            prefix = prefix._replace(token_ids=prefix.token_ids + request.generated)
        block_ids = self._block_ids(request, prefix, {} if block_ids is None else block_ids)
        routing_request = self._routing_request(request, prepared, prefix, block_ids, excluded=excluded)
        started = time.perf_counter()
        routed = self._router.pick(routing_request)
        self._metrics.routing_seconds.observe(time.perf_counter() - started)
        rank = routed.rank if routed.num_ranks > 1 else request.data_parallel_rank
        link = self._workers.links[routed.worker_id]
        return Route(link, link.client, routed, prefix, rank)

    def new_items(
        self, request: EngineRequest, prepared: PreparedPrompt, block_ids: dict[int, BlockIds]
    ) -> frozenset[str]:
        """Return the hashes of the items that every worker would have to encode. Adds the ids of the prompt's blocks to
        `block_ids`, by block size, for `choose`."""
        prefix = self._prefix(request, prepared)
        block_ids |= self._block_ids(request, prefix, block_ids)
        return self._router.new_items(self._routing_request(request, prepared, prefix, block_ids))

    def _routing_request(
        self,
        request: EngineRequest,
        prepared: PreparedPrompt | None,
        prefix: PromptPrefix,
        block_ids: dict[int, BlockIds],
        *,
        excluded: frozenset[str] = frozenset(),
    ) -> RoutingRequest:
        if not request.reads_prefix_cache:
            block_ids = {size: ids[:0] for size, ids in block_ids.items()}
        return RoutingRequest(
            block_ids=block_ids,
            num_tokens=len(prefix.token_ids) + len(prefix.unplaced_items),  # each has at least one
            media=prefix.media + prefix.unplaced_items,
            handover_bytes=_num_bytes(prepared),
            lora=request.adapter,
            session_id=request.session_id,
            rank=request.data_parallel_rank,
            excluded=excluded,
        )

    def begin(self, route: Route, request_id: str, *, is_sent: bool = True) -> None:
        """Count the request at its worker, announce it to other gateways, and log the decision. To be called as soon as
        it is sent, before any other request may be routed; or before it is sent, and then again. Idempotent."""
        if not route.routed.begin(is_sent=is_sent):
            return
        client = route.link.client
        if client is not None and client.reports.num_gateways > 1:
            route.routed.announce(client.reports.announce)
        decision = route.routed.decision
        logger.debug("%s is routed to %s (rank %d): %s", request_id, decision.worker_id, decision.rank, decision)

    def answered(
        self, route: Route, prepared: PreparedPrompt | None, first: OutputDelta
    ) -> Mapping[str, EmbeddingOutcome]:
        """Record the first output: the engine's cached tokens, and the expansions if the worker expanded the prompt.
        Return what the worker did about embeddings, by the mm_hash of the item; empty if it keeps none."""
        num_cached = first.num_cached_tokens
        route.routed.prefilled(num_cached, waited_s=first.times.queue_s if first.times is not None else None)
        routed_cached, num_tokens = route.routed.decision.cached_tokens, route.num_prompt_tokens(first)
        for kind, number in (("all", num_tokens), ("routed_cached", routed_cached), ("engine_cached", num_cached or 0)):
            self._metrics.prompt_tokens.labels(kind).inc(number)
        for span in first.placed or (*route.prefix.media, *route.prefix.unplaced_items):
            outcome = "cached" if span.end <= (num_cached or 0) else "computed"
            self._metrics.media_items.labels(span.modality, outcome).inc()
        if prepared is not None and first.placed and first.prompt_token_ids is not None:
            self._expansions.learn(prepared.source.token_ids, first.prompt_token_ids, first.placed)
        return self._embedding_outcomes(route, first)

    def _embedding_outcomes(self, route: Route, first: OutputDelta) -> dict[str, EmbeddingOutcome]:
        if first.placed or not route.link.encoder:
            return {}
        outcomes = {span.mm_hash: embedding_outcome(span, first) for span in route.prefix.media}
        for span in {span.mm_hash: span for span in route.prefix.media}.values():
            outcome = outcomes[span.mm_hash]
            self._metrics.embeddings.labels(outcome).inc()
            if outcome == "loaded":
                saved_s = span.num_embeds * self.encoder_ms_per_token / 1000
                self._metrics.embedding_loaded_bytes.inc(span.embedding_bytes)  # 0 if its media were sent
                self._metrics.encoder_saved_seconds.inc(saved_s)
        return outcomes

    def stats(self) -> RoutingStats:
        index, counts = self._router.index, self._router.predictions
        reports = {link.name: link.client.reports for link in self._workers.links.values() if link.client}
        return RoutingStats(
            num_blocks=index.num_blocks,
            num_entries=index.num_entries,
            num_encoder_items=self._router.num_encoder_items,
            num_fewer_cached=counts.num_fewer,
            num_more_cached=counts.num_more,
            num_unsent=self._router.num_unsent,
            event_lag_s={name: each.event_lag_s for name, each in reports.items() if each.event_lag_s},
            num_event_gaps={name: each.num_block_overflows for name, each in reports.items()},
        )

    def waits(self) -> WaitStats:
        """Return how long requests wait in engines."""
        return WaitStats(self._router.waits_s(), self._router.least_wait_s())

    def _block_ids(
        self, request: EngineRequest, prefix: PromptPrefix, known: dict[int, BlockIds]
    ) -> dict[int, BlockIds]:
        """Return the prompt's block ids by each block size of the workers; some may be `known`."""
        sizes = self._router.block_sizes
        if known.keys() >= set(sizes):
            return {size: known[size] for size in sizes}
        tokens = token_array(prefix.token_ids)
        return {
            size: prompt_block_ids(
                tokens,
                block_size=size,
                media=prefix.media,
                lora=request.adapter,
                cache_salt=request.cache_salt,
            )
            for size in sizes
        }

    def _prefix(self, request: EngineRequest, prepared: PreparedPrompt | None) -> PromptPrefix:
        """Return the prompt as the engine will see it, as far as that is known."""
        if prepared is None:
            return PromptPrefix(request.prompt.token_ids)
        if prepared.encoder_token_ids is not None:
            return PromptPrefix(request.prompt.token_ids, (), _beside(prepared, len(request.prompt.token_ids)))
        if prepared.features:
            return PromptPrefix(request.prompt.token_ids, tuple(map(_span, prepared.features)))
        source = prepared.source
        items = [Item(mm_hash, ref.modality) for mm_hash, ref in zip(prepared.mm_hashes, source.items, strict=True)]
        return self._expansions.expand(source.token_ids, items)


def _span(placed: PlacedFeature) -> MediaSpan:
    place, feature = placed.placeholder, placed.feature
    embedding_bytes = feature.nbytes if feature.embedding is not None else 0
    return MediaSpan(feature.mm_hash, place.offset, place.length, feature.modality, place.num_embeds, embedding_bytes)


def _beside(prepared: PreparedPrompt, end: int) -> tuple[MediaSpan, ...]:
    """Return the items of an encoder's prompt: they are encoded, but have no position in the decoder's."""
    if not prepared.features:
        pairs = zip(prepared.mm_hashes, prepared.source.items, strict=True)
        return tuple(MediaSpan(mm_hash, end, 0, ref.modality) for mm_hash, ref in pairs)
    return tuple(msgspec.structs.replace(_span(placed), offset=end, length=0) for placed in prepared.features)


def _num_bytes(prepared: PreparedPrompt | None) -> int:
    return sum(placed.feature.nbytes for placed in prepared.features) if prepared is not None else 0
