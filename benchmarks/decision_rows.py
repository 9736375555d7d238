"""For `medialane bench router`: what a request costs the gateway's event loop between its block ids and its worker.

Everything is measured, the gateway's part (`gateway.request.route.Routes`) and the router's: `choose`, on the critical
path of the request, and `begin`, which does the bookkeeping (the record, the queue, the pending blocks) after it was
sent. Only hashing is left out: it has its own table.

The router has the same blocks as in `match`, a queue of a few requests at each slot, and encoder caches. A prompt has
an image among its first blocks; a request is prefilled and released after some hundred others, as in production.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from harness import median, percentile
from indexed_prompts import SYSTEM_BLOCKS, IndexedPrompts
from medialane.gateway import PromptPrefix, Route, Routes, WorkerPool
from medialane.observability import Metrics
from medialane.routing import Router, RoutingConfig
from medialane.testing.fake_worker import FakeLink
from medialane.types.feature import Feature, MediaPrompt, PlacedFeature, PlaceholderRange, PreparedPrompt
from medialane.types.media import MediaSize
from medialane.types.request import EngineRequest, ExpandedPrompt, ModelCard, WorkerLoad
from medialane.types.tensor import ArenaRange, TensorDescriptor, TensorSpec
from medialane.wire import LoadReport

BLOCK = 16
IN_FLIGHT = 500
#: Hot images, and tokens of each.
NUM_IMAGES, IMAGE_TOKENS = 64, 1000
#: No engine here stores blocks: disables the warnings about that.
_CONFIG = RoutingConfig()
_SPEC = TensorSpec("uint8", (4 << 20,))
_RANGE = ArenaRange("a" * 32, 0, (4 << 20) + 64, 1)
#: A prompt is routed before its media are inspected.
_NO_MEDIA: Any = None
_CARD = ModelCard("m", 1 << 20, BLOCK, {}, encoder_cache_tokens=1 << 16, max_num_seqs=256)


def decision_rows(*, num_slots: int, num_blocks: int, lengths: tuple[int, ...], rounds: int) -> list[dict[str, object]]:
    """Return one row for each prompt length, in blocks."""
    routes, prompts = _routes(num_slots), IndexedPrompts(num_slots=num_slots, num_blocks=num_blocks)
    prompts.store(routes.router.index.store)
    in_flight: deque[Route] = deque()
    rows: list[dict[str, object]] = []
    for length in lengths:
        choosing: list[float] = []
        beginning: list[float] = []
        token_ids = list(range(length * BLOCK + 3))
        for number in range(rounds + IN_FLIGHT):
            request = EngineRequest(f"r{number}", ExpandedPrompt(token_ids), b"")
            prepared, routes.ids = _prepared(token_ids, number), prompts.arriving(length)
            started = time.thread_time()
            route = routes.choose(request, prepared)
            chosen = time.thread_time()
            routes.begin(route, request.request_id)
            if number >= IN_FLIGHT:
                choosing.append((chosen - started) * 1e6)
                beginning.append((time.thread_time() - chosen) * 1e6)
            in_flight.append(route)
            while len(in_flight) > IN_FLIGHT:
                done = in_flight.popleft().routed
                done.prefilled(done.decision.cached_tokens)
                done.release()
        whole = [sum(each) for each in zip(choosing, beginning, strict=True)]
        rows.append(
            {
                "blocks indexed": num_blocks,
                "slots": num_slots,
                "prompt blocks": length,
                "choose p50 us": median(choosing),
                "choose p99 us": percentile(choosing, 0.99),
                "begin p50 us": median(beginning),
                "begin p99 us": percentile(beginning, 0.99),
                "both p50 us": median(whole),
                "both p99 us": percentile(whole, 0.99),
            }
        )
    return rows


class _HashedRoutes(Routes):
    """Routes for prompts whose block ids are `ids`."""

    ids: NDArray[np.uint64]

    def __init__(self, router: Router, workers: WorkerPool) -> None:
        super().__init__(router, workers, Metrics(CollectorRegistry()))
        self.router = router

    def _block_ids(
        self, _request: EngineRequest, _prefix: PromptPrefix, _known: dict[int, NDArray[np.uint64]]
    ) -> dict[int, NDArray[np.uint64]]:
        return {BLOCK: self.ids}


def _routes(num_slots: int) -> _HashedRoutes:
    links = [FakeLink(f"w{number}", _CARD, same_host=number % 2 == 0) for number in range(num_slots)]
    routes = _HashedRoutes(Router(_CONFIG, seed=1), WorkerPool(links))
    for number, link in enumerate(links):
        link.worker.report(LoadReport((WorkerLoad(number % 7),)))
        link.join()
    return routes


def _prepared(token_ids: list[int], number: int) -> PreparedPrompt:
    mm_hash = f"{number * 7919 % NUM_IMAGES:064x}"
    tensor = TensorDescriptor(_SPEC, _RANGE, 64)
    feature = Feature("image", mm_hash, b"", (tensor,), MediaSize(width=1024, height=768))
    place = PlaceholderRange(SYSTEM_BLOCKS * BLOCK + 5, IMAGE_TOKENS)
    return PreparedPrompt(token_ids, (PlacedFeature(feature, place),), (mm_hash,), MediaPrompt([], ()), _NO_MEDIA)
