"""How the gateway serves."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from medialane.core.errors import StartupFailed


class GatewayConfig(msgspec.Struct, frozen=True):
    stage: Annotated[
        Literal["auto", "features", "decoded", "url"],
        msgspec.Meta(
            description="what is handed to workers: features (processed here), decoded (the worker processes), "
            "url (the worker decodes and processes), auto (features; decoded where the worker's processor is another; "
            "url when handing them over fails)"
        ),
    ] = "auto"
    max_requests: Annotated[
        int, msgspec.Meta(description="requests with media under way at once; more are answered 503 with Retry-After")
    ] = 1024
    max_uuids: Annotated[
        int,
        msgspec.Meta(description="names of media (`uuid`) that are remembered, those of all tenants; 0 is none"),
    ] = 100_000
    uuid_ttl_s: Annotated[
        float, msgspec.Meta(description="how long a name of media (`uuid`) is remembered after its last use")
    ] = 3600.0
    reconnect_initial_s: Annotated[
        float, msgspec.Meta(description="first pause before connecting to a worker again")
    ] = 0.2
    reconnect_max_s: Annotated[float, msgspec.Meta(description="longest pause before connecting to a worker again")] = (
        2.0
    )
    admin_timeout_s: Annotated[
        float,
        msgspec.Meta(
            description="how long a worker may take for an administrative call (sleep, pause, a LoRA adapter, ...)"
        ),
    ] = 300.0
    drain_timeout_s: Annotated[
        float, msgspec.Meta(description="at shutdown, how long running requests may take to finish")
    ] = 10.0

    def validate(self) -> None:
        if self.max_requests < 1:
            raise StartupFailed("max_requests must be at least 1")
        if self.max_uuids < 0:
            raise StartupFailed("max_uuids must not be negative")
        if self.uuid_ttl_s <= 0:
            raise StartupFailed("uuid_ttl_s must be positive")
        if not 0 < self.reconnect_initial_s <= self.reconnect_max_s:
            raise StartupFailed("reconnect_initial_s must be positive and at most reconnect_max_s")
        if self.admin_timeout_s <= 0:
            raise StartupFailed("admin_timeout_s must be positive")
        if self.drain_timeout_s < 0:
            raise StartupFailed("drain_timeout_s must not be negative")
