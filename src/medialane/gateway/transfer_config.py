"""Settings of the transfer to workers."""

from __future__ import annotations

import msgspec
from msgspec import field

from medialane.core.remote_entry import MoverChoice
from medialane.core.setting import NonNegativeInt, check_bounds
from medialane.gateway.transports import TransportChoice

MIB = 1024 * 1024


class TransferConfig(msgspec.Struct, frozen=True):
    transport: TransportChoice = field(default="auto", name="transport")
    """how features are sent: shm (shared memory, same host), tcp or nixl (copied by the store of the worker's host),
    inline (bytes with the message), auto (shm if the worker has proved that it maps the arena, else copied by its
    store, else inline)"""
    max_inline_bytes: NonNegativeInt = field(default=48 * MIB, name="transfer-max-inline-bytes")
    """most tensor bytes of one request that are sent inline"""

    @property
    def mover(self) -> MoverChoice:
        """The mover of entries that are copied by stores."""
        return self.transport if self.transport in ("tcp", "nixl") else "auto"

    def validate(self) -> None:
        check_bounds(self)
