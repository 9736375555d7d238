"""`medialane serve --ray`: gateways and store on this host, workers, and more gateways, where Ray places them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from medialane.cli.gateway_state import read_state
from medialane.cluster import Observer, Supervisor, local
from medialane.cluster.ray.ray_cluster import RayCluster
from medialane.cluster.ray.remote import RemoteSpec
from medialane.cluster.ray.remote_supervisor import RemoteSupervisor
from medialane.cluster.ray.remote_workers import Nodes, gateway_specs, with_join_addresses, worker_specs
from medialane.config import Config
from medialane.types.errors import StartupFailed


class RayServe:
    """What `medialane serve` does differently with Ray. Raises StartupFailed if the cluster cannot be connected to."""

    def __init__(self, config: Config, model: str) -> None:
        if Path(model).is_dir() and not Path(model).is_absolute():
            absolute = Path(model).resolve()
            raise StartupFailed(f"--ray needs the model's absolute path, the same on all nodes: {absolute}")
        self._cluster = RayCluster(config.cluster.ray_address)
        own, *self._others = self._cluster.nodes
        try:
            self.config = with_join_addresses(config, own, self._others)
        except StartupFailed:
            self.close()
            raise

    def specs(self, model: str, vllm_args: Sequence[str], folder: Path) -> list[RemoteSpec]:
        """Return the specifications of the processes that Ray places. Workers on this host use the store whose socket
        is in `folder`. Raises StartupFailed."""
        nodes = Nodes(self._cluster.node, self._others, f"unix:{local.store_path(folder)}")
        shared = uuid.uuid4().hex[:12]
        return [
            *gateway_specs(self.config, model, vllm_args, nodes, folder=shared),
            *worker_specs(self.config, model, vllm_args, nodes, has_gpus=self._cluster.has_gpus, folder=shared),
        ]

    def supervisor(
        self, own: Supervisor, specs: Sequence[RemoteSpec], observer: Observer, *, vllm_args: Sequence[str]
    ) -> RemoteSupervisor:
        """Return a supervisor of `own`, the processes of this host, and of those that Ray places."""
        config = self.config
        url = local.base_url(config, vllm_args)

        async def connected() -> set[str]:
            try:
                return (await read_state(url, verify=False)).connected_workers()
            except StartupFailed:
                return set()

        return RemoteSupervisor(
            own, self._cluster, specs, config=config.cluster, observer=observer, connected=connected
        )

    def close(self) -> None:
        """Leave the cluster. Idempotent."""
        self._cluster.close()
