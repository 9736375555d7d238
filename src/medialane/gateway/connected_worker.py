"""A worker that has accepted this gateway's registration, for the lifetime of the connection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from medialane.core.request import Endpoint, WorkerLoad
from medialane.rpc import RpcClient

#: Processor settings that differ: name -> (ours, the worker's).
Disagreements = Mapping[str, tuple[str | None, str | None]]


def disagreements(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Disagreements:
    """Return the settings in which two processors differ, by name."""
    names = sorted(ours.keys() | theirs.keys())
    return {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}


@dataclass(frozen=True)
class ConnectedWorker:
    """`disagreements` are computed at registration: the worker's settings do not change during a connection."""

    address: str
    client: RpcClient
    disagreements: Disagreements

    def endpoint(self, rank: int) -> Endpoint:
        """Return one of its data-parallel ranks, with its last reported load."""
        card, loads = self.client.welcome.card, self.client.loads
        return Endpoint(
            self.address,
            self.address,
            ready=True,
            load=loads[rank] if loads else WorkerLoad(),
            num_in_flight=self.client.num_in_flight,
            rank=rank,
            num_ranks=max(1, card.data_parallel_size),
            same_host=self.client.welcome.shm,
            card=card,
        )


def lost_endpoint(address: str, rank: int) -> Endpoint:
    """Return the endpoint of a worker that is not connected."""
    return Endpoint(address, address, ready=False, load=WorkerLoad(), num_in_flight=0, rank=rank)
