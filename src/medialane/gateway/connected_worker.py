"""A worker that has accepted this gateway's registration, for the lifetime of the connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from medialane.gateway.worker_link.client import RpcClient
from medialane.types.errors import StartupFailed
from medialane.types.request import Endpoint, WorkerLoad, WorkerRole

#: Processor settings that differ: name -> (ours, the worker's).
Disagreements = Mapping[str, tuple[str | None, str | None]]


def disagreements(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Disagreements:
    """Return the settings in which two processors differ, by name."""
    names = sorted(ours.keys() | theirs.keys())
    return {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}


#: Settings in which a worker may differ: it then processes media itself (stage `decoded`). With another model or
#: processor its answers would be different ones.
_MAY_DIFFER = frozenset({"dtype", "vllm", "transformers", "torch", "torchvision"})


def check_same_model(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raise StartupFailed, with one line for both sides, if a worker that joins has another model or processor. A
    simulated worker has no processor settings."""
    for name, (here, there) in disagreements(ours, theirs).items() if theirs else ():
        if name not in _MAY_DIFFER:
            what = "model" if name == "model" else f"processor setting {name}"
            raise StartupFailed(f"{what} is {there} at the worker and {here} at the gateway")


@dataclass(frozen=True)
class ConnectedWorker:
    """`disagreements` are computed at registration: the worker's settings do not change during a connection."""

    name: str
    client: RpcClient
    disagreements: Disagreements
    own_arena: Callable[[], str | None]
    can_grant: Callable[[], bool] = bool

    @property
    def same_host(self) -> bool:
        """Whether the worker has mapped the arena that this gateway's media are in."""
        return self.client.reports.arena is not None and self.client.reports.arena == self.own_arena()

    @property
    def can_pull(self) -> bool:
        """Whether the worker has a store on another host, which may copy from ours."""
        return self.client.reports.arena is not None and not self.same_host and self.can_grant()

    def endpoint(self, rank: int) -> Endpoint:
        """Return one of its data-parallel ranks, with its last reported load."""
        card, loads = self.client.welcome.card, self.client.reports.loads
        return Endpoint(
            self.name,
            self.name,
            ready=True,
            load=loads[rank] if loads else WorkerLoad(),
            num_in_flight=len(self.client.requests),
            rank=rank,
            num_ranks=max(1, card.data_parallel_size),
            same_host=self.same_host,
            card=card,
            can_pull=self.can_pull,
            role=card.role,
            stalled=self.client.reports.state == "stalled",
            draining=self.client.reports.state == "draining",
        )


def lost_endpoint(name: str, rank: int, role: WorkerRole = "worker") -> Endpoint:
    """Return the endpoint of a worker that is not connected; `role` is its last one."""
    return Endpoint(name, name, ready=False, load=WorkerLoad(), num_in_flight=0, rank=rank, role=role)
