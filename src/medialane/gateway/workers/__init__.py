"""A gateway's end of its connections to workers (`wire`; the worker's end is `worker.link`)."""

from medialane.gateway.workers.client import ClientCalls, ClientRequests, RemoteRequest, RpcClient
from medialane.gateway.workers.pool import JoinServer
from medialane.gateway.workers.reports import ClientReports

__all__ = [
    "ClientCalls",
    "ClientReports",
    "ClientRequests",
    "JoinServer",
    "RemoteRequest",
    "RpcClient",
]
