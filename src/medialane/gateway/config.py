"""Settings of the gateway."""

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
            description="what is sent to workers: features (processed tensors), decoded (the worker processes), "
            "url (the worker decodes and processes), auto (features; decoded if the worker's processor differs; "
            "url if the hand-over fails)"
        ),
    ] = "auto"
    max_requests: Annotated[
        int, msgspec.Meta(description="most concurrent requests with media; more get 503 with Retry-After")
    ] = 1024
    max_text_bytes: Annotated[
        int,
        msgspec.Meta(description="largest request body, excluding its media (--media-max-body-bytes includes them)"),
    ] = 4 << 20
    max_body_values: Annotated[
        int,
        msgspec.Meta(description="most JSON values in a request body, excluding token ids of a prompt"),
    ] = 20_000
    max_body_depth: Annotated[int, msgspec.Meta(description="deepest nesting of a request body's JSON")] = 100
    max_messages: Annotated[int, msgspec.Meta(description="most messages in a request, content parts included")] = 2000
    max_token_ids: Annotated[
        int, msgspec.Meta(description="most token ids in a request whose prompts are token ids")
    ] = 1 << 17
    max_bodies_bytes: Annotated[
        int,
        msgspec.Meta(
            description="most memory for request bodies and the media in them, over all requests "
            "together; more get 503 with Retry-After"
        ),
    ] = 2 << 30
    body_timeout_s: Annotated[float, msgspec.Meta(description="longest time to receive a request body")] = 300.0
    min_body_rate_bytes_per_s: Annotated[
        float,
        msgspec.Meta(description="a client that sends a body more slowly than this gets 408; 0 disables the limit"),
    ] = 10_000.0
    min_body_rate_grace_s: Annotated[
        float, msgspec.Meta(description="time before min_body_rate_bytes_per_s applies")
    ] = 10.0
    max_header_bytes: Annotated[
        int, msgspec.Meta(description="largest request header, including the request line; larger ones get 431")
    ] = 64 << 10
    header_timeout_s: Annotated[
        float, msgspec.Meta(description="longest time to complete a TLS handshake, and to receive a request header")
    ] = 20.0
    max_connections: Annotated[
        int,
        msgspec.Meta(
            description="most concurrent HTTP connections, pending TLS handshakes included, fewer if the limit of open "
            "files is lower; more get 503 with Retry-After"
        ),
    ] = 4096
    max_uuids: Annotated[
        int,
        msgspec.Meta(description="most media uuids that are remembered, over all tenants; 0 disables them"),
    ] = 100_000
    uuid_ttl_s: Annotated[float, msgspec.Meta(description="how long a media uuid is remembered after its last use")] = (
        3600.0
    )
    reconnect_initial_s: Annotated[float, msgspec.Meta(description="initial delay before reconnecting to a worker")] = (
        0.2
    )
    reconnect_max_s: Annotated[float, msgspec.Meta(description="longest delay before reconnecting to a worker")] = 2.0
    admin_timeout_s: Annotated[
        float,
        msgspec.Meta(
            description="timeout of an administrative call at a worker (sleep, pause, loading a LoRA adapter, ...)"
        ),
    ] = 300.0
    drain_timeout_s: Annotated[
        float, msgspec.Meta(description="how long running requests may take to finish at shutdown")
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
