"""Settings of the connections between gateways and workers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from medialane.core.errors import StartupFailed

MIB = 1 << 20


class RpcConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and deadlines; a gateway and its workers may differ, each guards itself."""

    max_frame_bytes: Annotated[
        int, msgspec.Meta(description="largest message between gateway and worker; a larger one ends the connection")
    ] = 64 * MIB
    max_write_buffer_bytes: Annotated[
        int,
        msgspec.Meta(description="bytes that may wait for one peer to read them; more requests are refused (503)"),
    ] = 256 * MIB
    max_in_flight: Annotated[
        int, msgspec.Meta(description="requests under way on one connection; more are refused (503)")
    ] = 2048
    max_queued_bytes: Annotated[
        int,
        msgspec.Meta(description="answer bytes of one request that may wait for a slow client before it is aborted"),
    ] = 8 * MIB
    max_connections: Annotated[int, msgspec.Meta(description="gateways that may be connected to one worker")] = 64
    connect_timeout_s: Annotated[
        float, msgspec.Meta(description="deadline for connecting to a worker, until it has welcomed the gateway")
    ] = 30.0
    release_timeout_s: Annotated[
        float,
        msgspec.Meta(description="how long a worker waits, at reconnection and shutdown, until requests have let go"),
    ] = 10.0
    heartbeat_interval_s: Annotated[float, msgspec.Meta(description="pause between two heartbeats")] = 1.0
    heartbeat_timeout_s: Annotated[
        float, msgspec.Meta(description="a peer that is silent for so long counts as dead")
    ] = 10.0
    token: Annotated[
        str,
        msgspec.Meta(description="secret that gateway and worker share; set it whenever workers listen on tcp://"),
    ] = ""

    def validate(self) -> None:
        """Raise StartupFailed naming the setting that cannot work."""
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
