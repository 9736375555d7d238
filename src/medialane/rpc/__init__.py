"""Control messages between gateways and workers: one connection per pair, requests to the worker, outputs streamed
back.

A worker runs an `RpcServer` over its `Handler`; a gateway connects an `RpcClient` and gets a `RemoteRequest` for each
submitted request. `messages.py` defines the protocol. Tensors are sent over the connection only if they are inline.
"""

from medialane.rpc.address import parse_address
from medialane.rpc.authentication import Role
from medialane.rpc.blocking import authenticate_socket
from medialane.rpc.client import RpcClient
from medialane.rpc.config import RpcConfig
from medialane.rpc.fake import FakeHandler
from medialane.rpc.handler import Handler
from medialane.rpc.messages import PROTOCOL_VERSION, Hello, Welcome
from medialane.rpc.remote_request import RemoteRequest
from medialane.rpc.security import Authentication, Security
from medialane.rpc.server import RpcServer

__all__ = [
    "PROTOCOL_VERSION",
    "Authentication",
    "FakeHandler",
    "Handler",
    "Hello",
    "RemoteRequest",
    "Role",
    "RpcClient",
    "RpcConfig",
    "RpcServer",
    "Security",
    "Welcome",
    "authenticate_socket",
    "parse_address",
]
