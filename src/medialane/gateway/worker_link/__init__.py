"""A gateway's end of its connections to workers (`wire`; the worker's end is `worker.gateway_link`)."""

from medialane.gateway.worker_link.client import RpcClient
from medialane.gateway.worker_link.client_calls import ClientCalls
from medialane.gateway.worker_link.client_reports import ClientReports, ReportListener
from medialane.gateway.worker_link.client_requests import ClientRequests
from medialane.gateway.worker_link.join_server import JoinServer
from medialane.gateway.worker_link.remote_request import RemoteRequest

__all__ = [
    "ClientCalls",
    "ClientReports",
    "ClientRequests",
    "JoinServer",
    "RemoteRequest",
    "ReportListener",
    "RpcClient",
]
