"""Settings of a worker."""

from __future__ import annotations

import msgspec
from msgspec import field

from medialane.types.errors import StartupFailed
from medialane.types.request import EncodeCache
from medialane.types.setting import PositiveFloat, ascii_host, check_bounds
from medialane.wire.address import TcpAddress, parse_tcp


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts for the engine are long, since an engine step may take seconds on a busy CPU."""

    ping_interval_s: PositiveFloat = field(default=2.0, name="worker-ping-interval")
    """interval of the engine's liveness check"""
    ping_timeout_s: PositiveFloat = field(default=60.0, name="worker-ping-timeout")
    """timeout of that check, so also the longest step of the engine; the worker exits after two missed checks, or one
    if the engine is stalled"""
    stall_timeout_s: PositiveFloat = field(default=10.0, name="worker-stall-timeout")
    """time without a reply or computation of the engine after which the worker is stalled: it gets no requests, and its
    requests move"""
    release_timeout_s: PositiveFloat = field(default=60.0, name="worker-release-timeout")
    """how long the engine may take to release an aborted request; then the worker exits"""
    stop_timeout_s: PositiveFloat = field(default=20.0, name="worker-stop-timeout")
    """how long the engine may take to stop at shutdown"""
    encode_cache: EncodeCache = field(default="auto", name="encode-cache")
    """keep the encoder's outputs in the arena for all workers of the host; auto: if the model and its settings allow it
    (the log says why not); on: do not start otherwise"""
    join: str = field(default="", name="join")
    """gateways to connect to (their --join-listen): HOST:PORT[,HOST:PORT...]; all addresses of each name"""
    name: str = field(default="", name="worker-name")
    """name of the worker in gateways, metrics and status, to be kept over restarts; default: host name with the metrics
    port, without one the process id; workers of `serve`: NAME/0, NAME/1"""
    join_resolve_interval_s: PositiveFloat = field(default=5.0, name="join-resolve-interval")
    """interval at which names of gateways (--join) are resolved, besides after a loss"""
    join_refused_interval_s: PositiveFloat = field(default=30.0, name="join-refused-interval")
    """time after which a refused worker tries again to join"""
    metrics_host: str = field(default="127.0.0.1", name="metrics-host")
    """address of /metrics, /health and /ready; 0.0.0.0: all interfaces"""
    metrics_port: int = field(default=0, name="metrics-port")
    """port of /metrics, /health and /ready; 0: none. Further data-parallel ranks and workers of a command have the next
    ports"""

    def validate(self) -> None:
        """Raise StartupFailed with the name of an invalid setting."""
        check_bounds(self)
        self.gateways()
        if not 0 <= self.metrics_port <= 65535:
            raise StartupFailed("metrics_port must be between 0 and 65535")
        try:
            ascii_host(self.metrics_host)
        except ValueError as error:
            raise StartupFailed(f"metrics_host: {error}") from error

    def gateways(self) -> list[TcpAddress]:
        """Return the addresses of `join`. Raises StartupFailed."""
        return (
            [parse_tcp(each.strip(), "--join", to_connect=True) for each in self.join.split(",")] if self.join else []
        )
