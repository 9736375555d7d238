"""For `medialane bench router`: what a whole choice takes, the search in the index included and hashing left out.

The decision is what stands between a request and its worker; its bookkeeping (the record, the queue, the notes of what
is cached soon) can wait until the request is sent.

The router has the same blocks as `match` does, a queue of a few requests at each slot, and encoder caches. A prompt has
an image among its first blocks; what is sent is prefilled and released after some hundred others, as in service.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from harness import median, percentile
from indexed_prompts import SYSTEM_BLOCKS, IndexedPrompts
from medialane.core.media_span import MediaSpan
from medialane.core.request import Endpoint, ModelCard, WorkerLoad
from medialane.routing import Routed, Router, RoutingRequest
from medialane.routing.config import RoutingConfig

BLOCK = 16
IN_FLIGHT = 500
#: Hot images, and tokens of each.
NUM_IMAGES, IMAGE_TOKENS = 64, 1000
#: No engine stores what is sent here; nobody shall wonder.
_CONFIG = RoutingConfig(store_grace_s=1e9)
_CARD = ModelCard("m", 1 << 20, BLOCK, {}, {}, encoder_cache_tokens=1 << 16, max_num_seqs=256)


def decision_rows(*, num_slots: int, num_blocks: int, lengths: tuple[int, ...], rounds: int) -> list[dict[str, object]]:
    """One row for each length of a prompt, in blocks."""
    router, prompts = Router(_CONFIG, seed=1), IndexedPrompts(num_slots=num_slots, num_blocks=num_blocks)
    for number in range(num_slots):
        router.join(Endpoint(f"w{number}", "", True, WorkerLoad(number % 7), 0, same_host=number % 2 == 0, card=_CARD))
    prompts.store(router.index.store)
    under_way: deque[Routed] = deque()
    rows: list[dict[str, object]] = []
    for length in lengths:
        deciding: list[float] = []
        keeping: list[float] = []
        for number in range(rounds + IN_FLIGHT):
            request = _request(prompts.arriving(length), number)
            started = time.thread_time()
            routed = router.pick(request)
            picked = time.thread_time()
            routed.begin()
            if number >= IN_FLIGHT:
                deciding.append((picked - started) * 1e6)
                keeping.append((time.thread_time() - picked) * 1e6)
            under_way.append(routed)
            while len(under_way) > IN_FLIGHT:
                done = under_way.popleft()
                done.prefilled(done.decision.cached_tokens)
                done.release()
        rows.append(
            {
                "blocks indexed": num_blocks,
                "slots": num_slots,
                "prompt blocks": length,
                "decision p50 us": median(deciding),
                "decision p99 us": percentile(deciding, 0.99),
                "bookkeeping p50 us": median(keeping),
                "bookkeeping p99 us": percentile(keeping, 0.99),
            }
        )
    return rows


def _request(ids: NDArray[np.uint64], number: int) -> RoutingRequest:
    image = MediaSpan(f"{number * 7919 % NUM_IMAGES:064x}", SYSTEM_BLOCKS * BLOCK + 5, IMAGE_TOKENS)
    return RoutingRequest(ids, BLOCK, len(ids) * BLOCK + 3, (image,), handover_bytes=4 << 20, request_id=f"r{number}")
