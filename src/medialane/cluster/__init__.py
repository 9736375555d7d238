"""Process placement and supervision: runs the processes of one host and leaves none behind.

`medialane.cluster.local` defines these processes. Import it by name: it needs the whole configuration, of which this
package's is a part.
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
