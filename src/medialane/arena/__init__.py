"""Shared memory for media: one file per host, allocated only by its owner and mapped by other processes.

The owner (the store) creates an `Arena`, reserves ranges, publishes the entries written there and hands out pins;
other processes open an `ArenaView` and resolve ranges and descriptors to memoryviews without a copy; a `FillWriter`
writes the payload of a range. `reap` removes files of dead owners.
"""

from medialane.arena.arena import Arena
from medialane.arena.config import ArenaConfig
from medialane.arena.entries import HoldLog
from medialane.arena.handles import Cached, Pin, Reservation, Unfinished
from medialane.arena.index import header_bytes
from medialane.arena.layout import (
    ENTRY_HEADER_BYTES,
    KEPT,
    LINEAGE_BYTES,
    Lineage,
    describe,
    layout,
)
from medialane.arena.locks import ClientSlot, FillWriter, Reaped, kept_arenas, new_slot, reap
from medialane.arena.names import NamesArea
from medialane.arena.view import ArenaView

__all__ = [
    "ENTRY_HEADER_BYTES",
    "KEPT",
    "LINEAGE_BYTES",
    "Arena",
    "ArenaConfig",
    "ArenaView",
    "Cached",
    "ClientSlot",
    "FillWriter",
    "HoldLog",
    "Lineage",
    "NamesArea",
    "Pin",
    "Reaped",
    "Reservation",
    "Unfinished",
    "describe",
    "header_bytes",
    "kept_arenas",
    "layout",
    "new_slot",
    "reap",
]
