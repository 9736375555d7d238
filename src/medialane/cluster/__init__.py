"""Process placement and supervision: runs the processes of one host and leaves none behind. (`local` defines
these processes). `ray` does the same with the nodes of a Ray cluster.
"""

from medialane.cluster.process_spec import HttpAnswers, ProcessSpec, ReadyCheck, SocketExists
from medialane.cluster.process_supervisor import Observer
from medialane.cluster.supervisor import Supervisor, running

__all__ = [
    "HttpAnswers",
    "Observer",
    "ProcessSpec",
    "ReadyCheck",
    "SocketExists",
    "Supervisor",
    "running",
]
