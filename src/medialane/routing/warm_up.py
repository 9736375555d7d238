"""Compiles all native functions of this package before they are needed."""

from __future__ import annotations

import logging
import time
from functools import lru_cache

import numpy as np

from medialane.core.feature import MediaSpan
from medialane.core.request import Endpoint, WorkerLoad
from medialane.routing.block_index import BlockIndex
from medialane.routing.config import RoutingConfig
from medialane.routing.cost import CostModel, ScoringInput, encoder_items
from medialane.routing.policies import policy
from medialane.routing.request import RoutingRequest
from medialane.routing.slots import SlotTable

logger = logging.getLogger(__name__)

_SLOW_S = 1.0
#: More than the initial table holds, so that growing is compiled, too.
_NUM_BLOCKS = 2000


@lru_cache(maxsize=1)
def warm_up() -> float:
    """Call each native function once with the argument types of production, so that no request waits for the compiler.
    Runs once per process; returns the seconds it took."""
    started = time.monotonic()
    request = RoutingRequest(np.arange(_NUM_BLOCKS, dtype=np.uint64), 16, 17 * _NUM_BLOCKS, (MediaSpan("", 0, 40),))
    _choose(request, _use(BlockIndex(), request))
    took = time.monotonic() - started
    if took > _SLOW_S:
        logger.info("compiled the router's native code in %.1f s", took)
    return took


def _use(index: BlockIndex, request: RoutingRequest) -> BlockIndex:
    ids = request.block_ids
    for slot in range(2):
        for first in range(0, len(ids), 100):
            index.store(slot, ids[first : first + 100])
    index.remove(0, ids[100:])
    for slot in range(100, 200):  # more sets than the initial capacity
        index.store(slot, ids[slot : slot + 1])
    index.clear(1)
    while not index.sweep():
        pass
    for slot in range(20):  # enough pending prefixes to grow their table, too
        prefix = index.note(slot, ids)
    index.note(0, prefix.ids, is_sampled=True)
    index.forget(prefix)
    index.holds(0, 0)
    index.match(ids, 1)
    return index


def _choose(request: RoutingRequest, index: BlockIndex) -> None:
    config = RoutingConfig()
    slots = SlotTable(config)
    slots.join(Endpoint("", "", True, WorkerLoad(), 0, same_host=True))
    offer = ScoringInput(request, encoder_items(request.media), (1,), 1, None)
    costs = CostModel(config)
    policy("cost", costs=costs, slots=slots, index=index, seed=None).choose(offer)
