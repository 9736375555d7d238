"""Same host: the descriptor travels, both ends map the arena, no byte is copied."""

from __future__ import annotations

from typing import Protocol

from medialane.core.errors import HandoverFailed
from medialane.core.request import TransportName
from medialane.core.tensor import InlineTensor, TensorDescriptor
from medialane.transfer.transport import HandedTensors


class ShmTransport:
    name: TransportName = "shm"

    def publish(self, tensors: tuple[TensorDescriptor, ...]) -> HandedTensors:
        return tensors


class MappedArena(Protocol):
    """What we need of an `arena.ArenaView`."""

    def tensor(self, descriptor: TensorDescriptor) -> memoryview: ...


class ShmReceiver:
    """Reads from the arenas that this process has mapped, by id."""

    def __init__(self) -> None:
        self._arenas: dict[str, MappedArena] = {}

    def add(self, arena: str, view: MappedArena) -> None:
        self._arenas[arena] = view

    def remove(self, arena: str) -> None:
        self._arenas.pop(arena, None)

    def fetch(self, tensor: TensorDescriptor | InlineTensor) -> memoryview:
        if not isinstance(tensor, TensorDescriptor):
            raise HandoverFailed("an inline tensor was given to the shm receiver")
        view = self._arenas.get(tensor.range.arena)
        if view is None:
            raise HandoverFailed("the tensor lies in an arena that this worker has not mapped")
        return view.tensor(tensor)
