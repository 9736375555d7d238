"""Life cycle of workers on a Ray cluster. Requests and tensors never pass through Ray.

`ray_cluster` alone imports Ray, and is not imported here.
"""

from medialane.cluster.ray.remote import (
    Location,
    Nodes,
    RemoteProcess,
    RemoteSpec,
    RemoteSupervisor,
    RunEnd,
    gateway_specs,
    remote_argv,
    remote_environ,
    with_join_addresses,
    worker_specs,
)

__all__ = [
    "Location",
    "Nodes",
    "RemoteProcess",
    "RemoteSpec",
    "RemoteSupervisor",
    "RunEnd",
    "gateway_specs",
    "remote_argv",
    "remote_environ",
    "with_join_addresses",
    "worker_specs",
]
