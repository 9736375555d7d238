"""Transports of tensors from a gateway to a worker: those of a feature, of decoded media, or encoded bytes as one; and
the order in which they are tried.

A transport has two ends. The gateway's converts the tensors of an arena entry to the form that is sent, the worker's
(`worker.receivers`) converts that form to readable bytes.

* `shm`, same host: the descriptor is sent, both ends map the arena, no byte is copied.
* `pull`, another host: the descriptor is sent, the store of the worker's host copies the entry by `tcp` or `nixl`.
* `inline`, any host, small tensors: the bytes are sent with the request message, copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Literal, Protocol, get_args

import msgspec

from medialane.core.remote_entry import MoverName
from medialane.core.stage import BEST_STAGE, STAGES, Stage, StageChoice, StageName, TransportName
from medialane.core.tensor import InlineTensor, TensorDescriptor, TransferTensors

TransportChoice = Literal["auto", "shm", "inline", MoverName]


class Transport(Protocol):
    """The gateway's end."""

    @property
    def name(self) -> TransportName: ...

    def publish(self, tensors: tuple[TensorDescriptor, ...]) -> TransferTensors:
        """Convert the tensors of one arena entry to the form that is sent.

        The caller holds the entry until the worker holds it, or has the bytes. Raises HandoverFailed.
        """
        ...


class ShmTransport:
    name: TransportName = "shm"

    def publish(self, tensors: tuple[TensorDescriptor, ...]) -> TransferTensors:
        return tensors


class PullTransport(ShmTransport):
    """The same descriptors; with each entry goes the right to copy it (`core.remote_entry`)."""

    name: TransportName = "pull"


class InlineTransport:
    """`read` returns the bytes of a descriptor, whose arena this process maps. The hand-over limits their size."""

    name: TransportName = "inline"

    def __init__(self, read: Callable[[TensorDescriptor], memoryview]) -> None:
        self._read = read

    def publish(self, tensors: tuple[TensorDescriptor, ...]) -> TransferTensors:
        return tuple(InlineTensor(t.spec, self._read(t)) for t in tensors)


class TransferPath(msgspec.Struct, frozen=True):
    """One stage and one transport."""

    stage: StageName
    transport: TransportName

    def __str__(self) -> str:
        return f"{self.stage}/{self.transport}"


def transfer_paths(
    stage: StageChoice,
    transport: TransportChoice,
    *,
    same_host: bool,
    can_pull: bool = False,
    same_processor: bool,
    prepared: bool,
) -> tuple[TransferPath, ...]:
    """Return the transfer paths to try, best first; empty if the configured choice is impossible at this worker.

    `same_host`: the worker has proved that it maps our arena. `can_pull`: it has a store that may connect to ours.
    `same_processor`: its processor settings equal ours, so our features are equivalent to its own. `prepared`: the
    request has features.
    """

    def is_possible(found: Stage) -> bool:
        return not found.same_processor or (same_processor and prepared)

    return tuple(
        TransferPath(found.name, name)
        for found in _stages(stage, is_possible)
        for name in _transports(found, transport, same_host=same_host, can_pull=can_pull)
    )


def _stages(choice: StageChoice, is_possible: Callable[[Stage], bool]) -> Iterator[Stage]:
    if choice != "auto":
        yield from filter(is_possible, [STAGES[choice]])
        return
    name: StageName | None = BEST_STAGE
    while name is not None:
        stage = STAGES[name]
        if is_possible(stage):
            yield stage
            name = stage.fallback
        else:
            name = stage.instead


def _transports(stage: Stage, choice: TransportChoice, *, same_host: bool, can_pull: bool) -> tuple[TransportName, ...]:
    """A choice of a mover is one of `pull`, and of `shm` for workers of this host, which need no copy."""
    possible = {"shm": same_host, "pull": can_pull and not same_host, "inline": True}
    chosen: Collection[str] = [choice]
    if choice in get_args(MoverName):
        chosen = ("shm", "pull")
    elif choice == "auto":
        chosen = stage.transports
    found = tuple(name for name in stage.transports if name in chosen and possible[name])
    if not found or found[-1] == "pull":  # the other host may be unreachable
        found += stage.last_resort
    return found
