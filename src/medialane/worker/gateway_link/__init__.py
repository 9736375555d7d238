"""A worker's end of its connections to gateways (`wire`; the gateway's end is `gateway.worker_link`)."""

from medialane.worker.gateway_link.handler import Handler
from medialane.worker.gateway_link.server import RpcServer

__all__ = ["Handler", "RpcServer"]
