"""Routes requests: what the router gets of a request, of workers, and of the engine's first output; and the expansions
of media items that are learned from it (`Expansions`).
"""

from __future__ import annotations

import logging
import sys
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
from cachetools import LRUCache

from medialane.gateway.records import EmbeddingOutcome, embedding_outcome
from medialane.gateway.workers.client import RpcClient
from medialane.gateway.workers.link import WorkerLink
from medialane.gateway.workers.pool import WorkerPool
from medialane.observability.metrics import Metrics
from medialane.routing import RoutedRequest, Router, RoutingRequest, Split, WholeReason
from medialane.types.feature import MediaSpan, PlacedFeature, PreparedPrompt
from medialane.types.kv_blocks import BlockIds, prompt_block_ids, token_array
from medialane.types.media import Modality
from medialane.types.request import EngineRequest, OutputDelta
from medialane.types.stats import RoutingStats, WaitStats

logger = logging.getLogger(__name__)

#: Limit on the tokens of all expansions together (a 1024x768 image of Qwen2.5-VL has 999).
MAX_TOKENS = 4 << 20
_UTF_32 = f"utf-32-{sys.byteorder[0]}e"


class Route(NamedTuple):
    """The worker of one request, and the connection to it at that time. `routed` reports the request's progress to the
    router; the request's scope owns it. `prefill` is the route to another worker that computes the prompt; `not_split`
    is why there is none."""

    link: WorkerLink
    client: RpcClient | None
    routed: RoutedRequest
    prefix: PromptPrefix
    data_parallel_rank: int | None
    prefill: Route | None = None
    not_split: WholeReason = ""

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
        may_split: bool = False,
    ) -> Route:
        """Return the worker for a request, none of the addresses `excluded`, and if it `may_split`, perhaps another one
        that computes its prompt. The router counts the request from `begin` on. `block_ids` were computed for this
        prompt by `new_items`. Raises NoWorkerReady."""
        prefix = self._prefix(request, prepared)
        if request.generated and not prefix.unplaced_items:
            prefix = prefix._replace(token_ids=prefix.token_ids + request.generated)
        block_ids = self._block_ids(request, prefix, {} if block_ids is None else block_ids)
        routing_request = self._routing_request(request, prepared, prefix, block_ids, excluded=excluded)
        started = time.perf_counter()
        split = self._router.pick_split(routing_request) if may_split else Split(self._router.pick(routing_request))
        self._metrics.routing_seconds.observe(time.perf_counter() - started)
        route = self._route(split.routed, prefix, request.data_parallel_rank)
        prefill = None if split.prefill is None else self._route(split.prefill, prefix, None)
        return route._replace(prefill=prefill, not_split=split.reason)

    def _route(self, routed: RoutedRequest, prefix: PromptPrefix, rank: int | None) -> Route:
        link = self._workers.links[routed.worker_id]
        return Route(link, link.client, routed, prefix, routed.rank if routed.num_ranks > 1 else rank)

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

    def received(self, route: Route, first: OutputDelta) -> None:
        """Record the first output of a prompt that another worker has computed."""
        route.routed.prefilled(first.num_own_cached_tokens)
        self._metrics.prompt_tokens.labels("transferred").inc(first.num_transferred_tokens)

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


class Item(NamedTuple):
    """One media item of an unexpanded prompt; items are in the order of their modality's placeholders."""

    mm_hash: str
    modality: Modality


class PromptPrefix(NamedTuple):
    """The known start of the prompt as the engine will see it; `unplaced_items` come somewhere after it."""

    token_ids: list[int]
    media: tuple[MediaSpan, ...] = ()
    unplaced_items: tuple[MediaSpan, ...] = ()


class Expansions:
    """A bounded LRU cache of the expansions of media items in prompts that workers expand (stages `decoded` and `url`),
    learned from their outputs.

    Exact routing needs the prompt as the engine will see it, with every item's placeholder expanded. If a worker
    expands it, its first output reports the expanded prompt and the position of each item. From then on, prompts with
    the same items are expanded here as well. An item that no worker has reported is in no worker's cache either: the
    prompt is known up to it, and nothing after it could be cached.

    What is learned is checked: the tokens between the items must equal the unexpanded prompt's. For a model that moves
    or rewrites them, nothing is learned, and requests are routed by the tokens before their media. A wrong prediction
    costs time, never correctness.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._expansions: LRUCache[str, list[int]] = LRUCache(max_tokens, getsizeof=len)
        #: The unexpanded placeholder of one item, by modality.
        self._placeholders: dict[str, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._expansions)

    def learn(self, source: Sequence[int], expanded: Sequence[int], placed: Iterable[MediaSpan]) -> bool:
        """Store the expansions of a prompt's items. False if the two prompts cannot be aligned."""
        spans = sorted(placed, key=lambda span: span.offset)
        placeholders = _align(source, expanded, spans)
        if placeholders is None:
            return False
        for span, placeholder in zip(spans, placeholders, strict=True):
            self._placeholders[span.modality] = placeholder
            if span.length <= self._expansions.maxsize:
                self._expansions[span.mm_hash] = list(expanded[span.offset : span.offset + span.length])
        return True

    def expand(self, source: Sequence[int], items: Sequence[Item]) -> PromptPrefix:
        """Return the prompt as a worker will expand it, up to the first unknown item."""
        ids: list[int] = []
        spans: list[MediaSpan] = []
        done = 0
        for start, end, item in self._places(source, items):
            ids += source[done:start]
            expansion = self._expansions.get(item.mm_hash)
            if expansion is None:
                return _prefix(ids, spans, items)
            spans.append(MediaSpan(item.mm_hash, len(ids), len(expansion), item.modality, len(expansion)))
            ids += expansion
            done = end
        if len(spans) < len(items):  # an unknown placeholder: it may be anywhere
            return _prefix([], [], items)
        ids += source[done:]
        return _prefix(ids, spans, items)

    def _places(self, source: Sequence[int], items: Sequence[Item]) -> list[tuple[int, int, Item]]:
        """Return (start, end, item) of the items' placeholders in the source, in prompt order."""
        by_modality: dict[str, list[Item]] = {}
        for item in items:
            by_modality.setdefault(item.modality, []).append(item)
        placed = []
        text = _as_text(source) if by_modality else None
        for modality, own in by_modality.items():
            placeholder = self._placeholders.get(modality)
            if placeholder is None:
                return []
            places = _occurrences(text, _as_text(placeholder), len(own))
            placed += [(place, place + len(placeholder), item) for place, item in zip(places, own, strict=False)]
        return sorted(placed)


def _prefix(token_ids: list[int], spans: list[MediaSpan], items: Sequence[Item]) -> PromptPrefix:
    """The tokens of other items are unknown, but a worker that is processing these items is the best one for them."""
    placed, end = {span.mm_hash for span in spans}, len(token_ids)
    unplaced = [MediaSpan(mm_hash, end, 0, modality) for mm_hash, modality in items if mm_hash not in placed]
    return PromptPrefix(token_ids, tuple(spans), tuple(unplaced))


def _align(source: Sequence[int], expanded: Sequence[int], spans: Sequence[MediaSpan]) -> list[tuple[int, ...]] | None:
    """Return the source tokens that each span replaced; None if the rest of the two prompts differs."""
    own, other = _as_text(source), _as_text(expanded)
    if own is None or other is None:
        return None
    placeholders: list[tuple[int, ...]] = []
    ends = chain((span.offset for span in spans), (len(other),))
    place = next(ends)
    if own[:place] != other[:place]:
        return None
    for span, end in zip(spans, ends, strict=True):
        text = other[span.offset + span.length : end]
        end_of_placeholder = _next_text(own, place, text, is_last=end == len(other))
        if end_of_placeholder is None:
            return None
        placeholders.append(tuple(source[place:end_of_placeholder]))
        place = end_of_placeholder + len(text)
    return placeholders


def _next_text(source: str, place: int, text: str, *, is_last: bool) -> int | None:
    """Return where `text` continues in the source after a placeholder of at least one token at `place`, or None."""
    start = len(source) - len(text) if is_last else source.find(text, place + 1)
    return start if start > place and source.startswith(text, start) else None


def _occurrences(source: str | None, pattern: str | None, limit: int) -> list[int]:
    """Return the offsets of the first `limit` non-overlapping occurrences of `pattern`."""
    offsets: list[int] = []
    if source is None or pattern is None:
        return offsets
    place = source.find(pattern)
    while place >= 0 and len(offsets) < limit:
        offsets.append(place)
        place = source.find(pattern, place + len(pattern))
    return offsets


def _as_text(token_ids: Sequence[int]) -> str | None:
    """Return one character per token; None if an id is not a code point (above 1.1 million).

    CPython searches strings in linear time in the worst case (two-way algorithm of `fastsearch.h`); comparing lists
    token by token is quadratic if tokens repeat.
    """
    try:
        return array("I", token_ids).tobytes().decode(_UTF_32, "surrogatepass")
    except (OverflowError, UnicodeDecodeError):
        return None
