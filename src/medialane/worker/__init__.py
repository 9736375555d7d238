"""Worker side: receives requests, reads the media handed over, generates, releases.

`serve_worker` runs a worker on an `Engine`; `RpcServer` is its end of the connections with gateways.
"""

from medialane.worker.config import WorkerConfig
from medialane.worker.link import RpcServer
from medialane.worker.serve import EXIT_ENGINE_LOST, serve_worker
from medialane.worker.worker import Worker

__all__ = [
    "EXIT_ENGINE_LOST",
    "RpcServer",
    "Worker",
    "WorkerConfig",
    "serve_worker",
]
