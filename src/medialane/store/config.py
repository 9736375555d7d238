"""Settings of the media store and of its clients."""

from __future__ import annotations

from typing import Annotated

import msgspec

from medialane.core.errors import StartupFailed


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_uuids: Annotated[
        int,
        msgspec.Meta(description="most media uuids that are remembered, over all tenants; 0 disables them"),
    ] = 100_000
    uuid_ttl_s: Annotated[float, msgspec.Meta(description="how long a media uuid is remembered after its last use")] = (
        3600.0
    )
    max_connections: Annotated[int, msgspec.Meta(description="most gateways and workers connected to one store")] = 256
    wait_timeout_s: Annotated[
        float,
        msgspec.Meta(description="how long a request waits for a store that is restarting before it gets 503"),
    ] = 10.0

    def validate(self) -> None:
        if self.max_uuids < 0:
            raise StartupFailed("max_uuids must not be negative")
        for name in ("uuid_ttl_s", "max_connections", "wait_timeout_s"):
            if getattr(self, name) <= 0:
                raise StartupFailed(f"{name} must be positive")
