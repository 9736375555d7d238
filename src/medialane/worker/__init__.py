"""Worker side: receives requests, reads transferred media, generates, releases.

`serve_worker` runs a worker on an `Engine`.
"""

from medialane.worker.config import WorkerConfig
from medialane.worker.serve import EXIT_ENGINE_LOST, serve_worker
from medialane.worker.worker import Worker

__all__ = [
    "EXIT_ENGINE_LOST",
    "Worker",
    "WorkerConfig",
    "serve_worker",
]
