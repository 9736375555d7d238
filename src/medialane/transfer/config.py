"""Settings of the transfer to workers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from medialane.core.errors import StartupFailed
from medialane.transfer.selection import TransportChoice

MIB = 1024 * 1024


class TransferConfig(msgspec.Struct, frozen=True):
    transport: Annotated[
        TransportChoice,
        msgspec.Meta(
            description="how features are sent: shm (shared memory, same host), inline (bytes with the message), "
            "auto (shm if the worker has proved that it maps the arena, else inline)"
        ),
    ] = "auto"
    max_inline_bytes: Annotated[
        int, msgspec.Meta(description="most tensor bytes of one request that are sent inline")
    ] = 48 * MIB

    def validate(self) -> None:
        if self.max_inline_bytes < 0:
            raise StartupFailed("max_inline_bytes must not be negative")
