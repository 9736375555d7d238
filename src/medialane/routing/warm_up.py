"""All native functions of this room, made ready before they are needed."""

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
#: More than the first table has room for, so that growing is done once, too.
_NUM_BLOCKS = 2000


@lru_cache(maxsize=1)
def warm_up() -> float:
    """Call each native function once with what it is called with in service, so that a request never waits for the
    compiler. Once a process; returns the seconds it took."""
    started = time.monotonic()
    request = RoutingRequest(np.arange(_NUM_BLOCKS, dtype=np.uint64), 16, 17 * _NUM_BLOCKS, (MediaSpan("", 0, 40),))
    _choose(request, _use(BlockIndex(), request))
    took = time.monotonic() - started
    if took > _SLOW_S:
        logger.info("native code of the router was made ready in %.1f s", took)
    return took


def _use(index: BlockIndex, request: RoutingRequest) -> BlockIndex:
    ids = request.block_ids
    for slot in range(2):
        for first in range(0, len(ids), 100):
            index.store(slot, ids[first : first + 100])
    index.remove(0, ids[100:])
    for slot in range(100, 200):  # more sets than there is room for at first
        index.store(slot, ids[slot : slot + 1])
    index.clear(1)
    while not index.sweep():
        pass
    for slot in range(20):  # as many notes as need more room, too
        note = index.note(slot, ids)
    index.forget(note)
    index.holds(0, 0)
    index.match(ids, 1)
    return index


def _choose(request: RoutingRequest, index: BlockIndex) -> None:
    config = RoutingConfig()
    slots = SlotTable(config)
    slots.join(Endpoint("", "", True, WorkerLoad(), 0, same_host=True))
    offer = ScoringInput(request, encoder_items(request.media, request.block_size), (1,), 1, None)
    costs = CostModel(config)
    policy("cost", costs=costs, slots=slots, index=index, seed=None).choose(offer)
