"""`medialane serve --ray`: gateways and store on this host, workers where Ray places them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from medialane.cli.gateway_state import read_state
from medialane.cluster import Observer, Supervisor, local
from medialane.cluster.ray import RayCluster
from medialane.cluster.remote_supervisor import RemoteSupervisor
from medialane.cluster.remote_workers import with_join_addresses, worker_specs
from medialane.config import Config
from medialane.core.errors import StartupFailed


class RayServe:
    """What `medialane serve` does differently with Ray. Raises StartupFailed if the cluster cannot be connected to."""

    def __init__(self, config: Config) -> None:
        self._cluster = RayCluster(config.cluster.ray_address)
        self.config = with_join_addresses(
            config, node_address=self._cluster.node_address, num_nodes=self._cluster.num_nodes
        )

    def supervisor(
        self, parts: Supervisor, observer: Observer, *, model: str, vllm_args: Sequence[str], folder: Path
    ) -> RemoteSupervisor:
        """Return a supervisor of `parts`, the processes of this host, and of the workers. Workers on this host use its
        store."""
        config, cluster = self.config, self._cluster
        store = ("--store", f"unix:{local.store_path(folder)}")
        specs = worker_specs(config, model, vllm_args, has_gpus=cluster.has_gpus, node_flags={cluster.node_id: store})
        url = local.base_url(config, vllm_args)

        async def connected() -> set[str]:
            try:
                return (await read_state(url, verify=False)).connected_workers()
            except StartupFailed:
                return set()

        return RemoteSupervisor(parts, cluster, specs, config=config.cluster, observer=observer, connected=connected)

    def close(self) -> None:
        """Leave the cluster. Idempotent."""
        self._cluster.close()
