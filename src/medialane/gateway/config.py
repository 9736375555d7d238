"""How the gateway serves."""

from __future__ import annotations

from typing import Annotated

import msgspec

from medialane.core.errors import StartupFailed
from medialane.core.stage import StageChoice

_POSITIVE = (
    "max_text_bytes",
    "max_body_values",
    "max_body_depth",
    "max_messages",
    "max_token_ids",
    "max_bodies_bytes",
    "body_timeout_s",
    "max_header_bytes",
    "header_timeout_s",
    "max_connections",
)


class GatewayConfig(msgspec.Struct, frozen=True):
    stage: Annotated[
        StageChoice,
        msgspec.Meta(
            description="what is handed to workers: features (processed here), decoded (the worker processes), "
            "url (the worker decodes and processes), auto (features; decoded where the worker's processor is another; "
            "url when handing them over fails)"
        ),
    ] = "auto"
    max_requests: Annotated[
        int, msgspec.Meta(description="requests with media under way at once; more are answered 503 with Retry-After")
    ] = 1024
    max_text_bytes: Annotated[
        int,
        msgspec.Meta(description="largest request body without its media, which --media-max-body-bytes includes"),
    ] = 4 << 20
    max_body_values: Annotated[
        int,
        msgspec.Meta(description="most JSON values of a request body, token ids of a prompt aside"),
    ] = 20_000
    max_body_depth: Annotated[int, msgspec.Meta(description="most levels of nesting of a request body's JSON")] = 100
    max_messages: Annotated[
        int, msgspec.Meta(description="most messages of a request, the parts of their contents counted as well")
    ] = 2000
    max_token_ids: Annotated[
        int, msgspec.Meta(description="most token ids of a request whose prompts are given as token ids")
    ] = 1 << 17
    max_bodies_bytes: Annotated[
        int,
        msgspec.Meta(
            description="most bytes of request bodies and of the media in them that are held at once, all requests "
            "together; more are answered 503 with Retry-After"
        ),
    ] = 2 << 30
    body_timeout_s: Annotated[
        float, msgspec.Meta(description="longest time that a client may take to send the body of a request")
    ] = 300.0
    min_body_rate_bytes_per_s: Annotated[
        float,
        msgspec.Meta(description="a client that sends a body more slowly than this is answered 408; 0 is no limit"),
    ] = 10_000.0
    min_body_rate_grace_s: Annotated[
        float, msgspec.Meta(description="time after which min_body_rate_bytes_per_s begins to hold")
    ] = 10.0
    max_header_bytes: Annotated[
        int, msgspec.Meta(description="largest header of a request, its first line included; more are answered 431")
    ] = 64 << 10
    header_timeout_s: Annotated[
        float, msgspec.Meta(description="longest time that a client may take to send the header of a request")
    ] = 20.0
    max_connections: Annotated[
        int,
        msgspec.Meta(
            description="most HTTP connections at once, fewer where the limit of open files is lower; more get "
            "503 with Retry-After"
        ),
    ] = 4096
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
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise StartupFailed(f"{name} must be positive")
        if self.min_body_rate_bytes_per_s < 0 or self.min_body_rate_grace_s < 0:
            raise StartupFailed("min_body_rate_bytes_per_s and min_body_rate_grace_s must not be negative")
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
