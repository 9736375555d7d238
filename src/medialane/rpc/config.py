"""Settings of the connections between gateways and workers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from medialane.core.errors import StartupFailed

MIB = 1 << 20


class RpcConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and timeouts, applied locally: a gateway and its workers may have different ones."""

    max_frame_bytes: Annotated[
        int, msgspec.Meta(description="largest message between gateway and worker; a larger one ends the connection")
    ] = 64 * MIB
    max_write_buffer_bytes: Annotated[
        int,
        msgspec.Meta(description="most bytes buffered for a peer that reads slowly; further requests get 503"),
    ] = 256 * MIB
    max_in_flight: Annotated[
        int, msgspec.Meta(description="most concurrent requests on one connection; more get 503")
    ] = 2048
    max_queued_bytes: Annotated[
        int,
        msgspec.Meta(description="most output bytes buffered for a slow client before its request is aborted"),
    ] = 8 * MIB
    max_connections: Annotated[int, msgspec.Meta(description="most gateways connected to one worker")] = 64
    connect_timeout_s: Annotated[
        float, msgspec.Meta(description="timeout for connecting to and registering with a worker")
    ] = 30.0
    release_timeout_s: Annotated[
        float,
        msgspec.Meta(description="how long a worker waits for requests to be released, at reconnection and shutdown"),
    ] = 10.0
    heartbeat_interval_s: Annotated[float, msgspec.Meta(description="heartbeat interval")] = 1.0
    heartbeat_timeout_s: Annotated[
        float, msgspec.Meta(description="time without data after which a peer is considered dead")
    ] = 10.0
    token: Annotated[
        str,
        msgspec.Meta(description="shared secret of gateway and workers; set it if workers listen on tcp://"),
    ] = ""

    def validate(self) -> None:
        """Raise StartupFailed with the name of an invalid setting."""
        for name in ("max_frame_bytes", "max_write_buffer_bytes", "max_in_flight", "max_queued_bytes"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1")
        _require(self.max_frame_bytes < 1 << 32, "max_frame_bytes must be less than 4 GiB")
        _require(self.max_connections >= 1, "max_connections must be at least 1")
        _require(self.heartbeat_interval_s > 0, "heartbeat_interval_s must be positive")
        _require(
            self.heartbeat_timeout_s >= 2 * self.heartbeat_interval_s,
            "heartbeat_timeout_s must be at least two heartbeat_interval_s",
        )
        _require(
            0 < self.release_timeout_s < self.connect_timeout_s,
            "release_timeout_s must be positive and less than connect_timeout_s, which includes it",
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise StartupFailed(message)
