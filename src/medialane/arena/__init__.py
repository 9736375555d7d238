"""Shared memory that outlives a request: one file per host, allocated by its owner alone, mapped by everyone else.

The owner (the gateway) makes an `Arena`, reserves ranges, publishes what was written there and hands out leases; other
processes open an `ArenaView` and turn ranges and descriptors into memoryviews without a copy. `reap` removes what dead
owners left.
"""

from medialane.arena.arena import Arena
from medialane.arena.config import ArenaConfig
from medialane.arena.entries import Kind
from medialane.arena.layout import ENTRY_HEADER_BYTES, describe, layout
from medialane.arena.lease import Lease, Reservation
from medialane.arena.reaper import Reaped, reap
from medialane.arena.view import ArenaView

__all__ = [
    "ENTRY_HEADER_BYTES",
    "Arena",
    "ArenaConfig",
    "ArenaView",
    "Kind",
    "Lease",
    "Reaped",
    "Reservation",
    "describe",
    "layout",
    "reap",
]
