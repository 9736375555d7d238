"""Who runs where. A supervisor keeps the processes of one machine running and leaves none behind.

`medialane.cluster.local` knows what these processes are; it is imported by name, because it needs the whole
configuration, which in turn is composed of this room's.
"""

from medialane.cluster.config import ClusterConfig
from medialane.cluster.process_spec import HttpAnswers, ProcessSpec, ReadyCheck, SocketExists
from medialane.cluster.process_supervisor import Observer
from medialane.cluster.supervisor import Supervisor, running

__all__ = [
    "ClusterConfig",
    "HttpAnswers",
    "Observer",
    "ProcessSpec",
    "ReadyCheck",
    "SocketExists",
    "Supervisor",
    "running",
]
