"""The parts of a `Router`, put together as it does, each of them in reach.

What is tested by itself of the room's inside is imported here alone.
"""

from medialane.routing import BlockIndex, RoutingConfig
from medialane.routing.block_index import PendingBlocks, longest
from medialane.routing.cost import CostModel, EncoderItem, PrefixEvictions, ScoringInput, encoder_items
from medialane.routing.encoder_cache import EncoderCacheModel, EncoderCaches
from medialane.routing.policies import Choice, Policy
from medialane.routing.routed_request import Prediction, PredictionMonitor, RouterState
from medialane.routing.slots import SEQUENCES, SlotTable, bit_rows
from medialane.types.errors import Permits

__all__ = [
    "SEQUENCES",
    "Choice",
    "EncoderCacheModel",
    "EncoderCaches",
    "EncoderItem",
    "PendingBlocks",
    "Prediction",
    "PredictionMonitor",
    "RouterParts",
    "SlotTable",
    "bit_rows",
    "encoder_items",
    "longest",
    "scoring_input",
]


class RouterParts:
    def __init__(self, config=None, *, clock=lambda: 0.0):
        self.config = config or RoutingConfig()
        self.slots = SlotTable(self.config)
        self.index = BlockIndex()
        self.pending = PendingBlocks(ttl_s=60, clock=clock)
        self.caches = EncoderCaches()
        self.predictions = PredictionMonitor(self.index.holds, clock=clock)
        self.costs = CostModel(self.config)
        self.evictions = PrefixEvictions(self.costs.rates.token)
        self.state = RouterState(
            self.config.router,
            self.costs,
            self.slots,
            self.index,
            self.pending,
            self.evictions,
            self.caches,
            self.predictions,
            {},
            Permits(clock=clock),
        )

    def policy(self, name, *, seed=None):
        return Policy(
            name,
            costs=self.costs,
            slots=self.slots,
            index=self.index,
            pending=self.pending,
            evictions=self.evictions,
            seed=seed,
        )


def scoring_input(request, holders_of=None, *, candidates, session_slot=None):
    """`holders_of` returns the slots that have an item in their encoder cache; without it the items do not count."""
    items = encoder_items(request.media) if holders_of else ()
    return ScoringInput(request, items, tuple(holders_of(item.mm_hash) for item in items), candidates, session_slot)
