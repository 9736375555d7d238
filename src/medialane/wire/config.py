"""Settings of all connections between processes."""

from __future__ import annotations

import msgspec
from msgspec import field

from medialane.types.errors import StartupFailed
from medialane.types.setting import PositiveFloat, PositiveInt, SecretText, check_bounds, hidden

MIB = 1 << 20


class RpcConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and timeouts, applied locally: a gateway and its workers may have different ones."""

    max_frame_bytes: PositiveInt = field(default=64 * MIB, name="rpc-max-frame-bytes")
    """largest message; a larger one ends the connection"""
    max_write_buffer_bytes: PositiveInt = field(default=256 * MIB, name="rpc-max-write-buffer-bytes")
    """most bytes buffered for a peer that reads slowly; further requests get 503"""
    max_in_flight: PositiveInt = field(default=2048, name="rpc-max-in-flight")
    """most concurrent requests on one connection; more get 503"""
    max_queued_bytes: PositiveInt = field(default=8 * MIB, name="rpc-max-queued-bytes")
    """most output bytes buffered for a slow client before its request is aborted"""
    max_pooled_bytes: PositiveInt = field(default=512 * MIB, name="rpc-max-pooled-bytes")
    """largest output of a pooling request; a larger one gets 413"""
    max_connections: PositiveInt = field(default=64, name="rpc-max-connections")
    """most gateways connected to one worker"""
    connect_timeout_s: float = field(default=30.0, name="rpc-connect-timeout")
    """timeout for connecting to and registering with a worker"""
    release_timeout_s: float = field(default=10.0, name="rpc-release-timeout")
    """how long a worker waits for requests to be released, at reconnection and shutdown"""
    heartbeat_interval_s: PositiveFloat = field(default=1.0, name="rpc-heartbeat-interval")
    """heartbeat interval on unix sockets"""
    heartbeat_timeout_s: float = field(default=10.0, name="rpc-heartbeat-timeout")
    """time without data on a unix socket after which the peer counts as dead (the kernel reports an exit at once)"""
    tcp_heartbeat_interval_s: PositiveFloat = field(default=0.3, name="rpc-tcp-heartbeat-interval")
    """heartbeat interval on TCP connections"""
    tcp_heartbeat_timeout_s: float = field(default=0.6, name="rpc-tcp-heartbeat-timeout")
    """time without data on a TCP connection after which the peer counts as dead; detected within another interval"""
    handshake_timeout_s: PositiveFloat = field(default=5.0, name="rpc-handshake-timeout")
    """time for a TCP peer to authenticate itself, TLS included"""
    secret_file: str = field(default="", name="rpc-secret-file")
    """file with the secret of gateways and workers (or MEDIALANE_RPC_SECRET), needed for tcp:// addresses beyond
    loopback; a second line is accepted, too"""
    shared_secret: SecretText = field(default="", name="rpc-secret")
    """the shared secret itself, instead of its file"""
    tls_cert: str = field(default="", name="rpc-tls-cert")
    """PEM file with the certificate of this process, for TLS on tcp:// addresses"""
    tls_key: str = field(default="", name="rpc-tls-key")
    """PEM file with its private key"""
    tls_ca: str = field(default="", name="rpc-tls-ca")
    """PEM file with the certificate authority of all processes"""
    tls_check_hostname: bool = field(default=False, name="rpc-tls-check-hostname")
    """a certificate must also be for the host that was connected to"""

    insecure: bool = field(default=False, name="rpc-insecure")
    """allow tcp:// addresses beyond loopback without TLS: whoever is on the network path, or gets a connection by
    mistake, can read all requests, answers and media, and take over connections"""

    def validate(self) -> None:
        """Raise StartupFailed with the name of an invalid setting."""
        check_bounds(self)
        _require(self.max_frame_bytes < 1 << 32, "max_frame_bytes must be less than 4 GiB")
        _require(
            self.heartbeat_timeout_s >= 2 * self.heartbeat_interval_s,
            "heartbeat_timeout_s must be at least two heartbeat_interval_s",
        )
        _require(
            self.tcp_heartbeat_timeout_s >= 2 * self.tcp_heartbeat_interval_s,
            "tcp_heartbeat_timeout_s must be at least two tcp_heartbeat_interval_s",
        )
        _require(
            0 < self.release_timeout_s < self.connect_timeout_s,
            "release_timeout_s must be positive and less than connect_timeout_s, which includes it",
        )
        files = [self.tls_cert, self.tls_key, self.tls_ca]
        _require(all(files) or not any(files), "TLS needs all of tls_cert, tls_key and tls_ca")
        _require(not (self.insecure and any(files)), "insecure is for connections without TLS: remove it, or tls_cert")
        _require(all(files) or not self.tls_check_hostname, "tls_check_hostname needs TLS: tls_cert, tls_key, tls_ca")

    def __repr__(self) -> str:
        return super(RpcConfig, hidden(self)).__repr__()


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise StartupFailed(message)
