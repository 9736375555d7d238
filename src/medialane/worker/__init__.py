"""Worker side: receives requests, reads transferred media, generates, releases.

`serve_worker` runs a worker on an `Engine`.
"""

from medialane.worker.config import WorkerConfig
from medialane.worker.engine import Engine
from medialane.worker.host_arena import HostArena
from medialane.worker.serve import EXIT_ENGINE_LOST, default_name, serve_until, serve_worker
from medialane.worker.server import RpcServer
from medialane.worker.worker import Worker

__all__ = [
    "EXIT_ENGINE_LOST",
    "Engine",
    "HostArena",
    "RpcServer",
    "Worker",
    "WorkerConfig",
    "default_name",
    "serve_until",
    "serve_worker",
]
