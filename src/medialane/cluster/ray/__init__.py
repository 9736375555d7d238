"""Life cycle of workers on a Ray cluster. Requests and tensors never pass through Ray.

`ray_cluster` alone imports Ray, and is not imported here.
"""

from medialane.cluster.ray.remote import RemoteSpec
from medialane.cluster.ray.remote_supervisor import RemoteSupervisor
from medialane.cluster.ray.remote_workers import Nodes, gateway_specs, with_join_addresses, worker_specs

__all__ = [
    "Nodes",
    "RemoteSpec",
    "RemoteSupervisor",
    "gateway_specs",
    "with_join_addresses",
    "worker_specs",
]
