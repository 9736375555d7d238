"""Connections between processes: framing, the handshake with its secret and TLS, listeners, and the messages between
gateways and workers (`protocol`). It knows no roles: the gateway's end is `gateway.worker_link`, the worker's is
`worker.gateway_link`.
"""

from medialane.wire.address import parse_address
from medialane.wire.authentication import Role
from medialane.wire.config import RpcConfig
from medialane.wire.protocol import PROTOCOL_VERSION, Hello, Join, Welcome
from medialane.wire.security import Authentication, Security

__all__ = [
    "PROTOCOL_VERSION",
    "Authentication",
    "Hello",
    "Join",
    "Role",
    "RpcConfig",
    "Security",
    "Welcome",
    "parse_address",
]
