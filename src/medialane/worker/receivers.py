"""The worker's ends of transports (the gateway's: `gateway.transports`): what was sent becomes readable bytes."""

from __future__ import annotations

from typing import Protocol

from medialane.arena import ArenaView
from medialane.arena.layout import is_completed, is_valid
from medialane.core.errors import HandoverFailed, MediaLost
from medialane.core.tensor import ArenaRange, InlineTensor, TensorDescriptor


class Receiver(Protocol):
    """The worker's end."""

    def fetch(self, tensor: TensorDescriptor | InlineTensor) -> memoryview:
        """Return the tensor's bytes, valid until the request is released. Raises HandoverFailed."""
        ...


class ShmReceiver:
    """Maps the arena of this host's store, read-only, and reads from it. The owner calls `close`."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._views: dict[str, ArenaView] = {}

    def attach(self, arena: str, nonce: bytes) -> bool:
        """Map the arena. True if it contains the nonce, which proves that it is the store's. Idempotent.

        A wrong nonce changes nothing: the mapping may be in use.
        """
        if (view := self._views.get(arena)) is not None:
            return view.nonce == nonce
        try:
            view = ArenaView.open(arena, self._directory)
        except HandoverFailed:
            return False
        if view.nonce != nonce:
            view.close()
            return False
        self._views[arena] = view
        return True

    def detach(self, arena: str) -> None:
        """Unmap the arena: no further descriptors of it are sent. Idempotent."""
        if (view := self._views.pop(arena, None)) is not None:
            view.close()

    def fetch(self, tensor: TensorDescriptor | InlineTensor) -> memoryview:
        if not isinstance(tensor, TensorDescriptor):
            raise HandoverFailed("an inline tensor was given to the shm receiver")
        view = self._views.get(tensor.range.arena)
        if view is None:
            raise MediaLost("the tensor is in an arena that this worker has not mapped")
        return view.tensor(tensor)

    def is_completed(self, entry: ArenaRange) -> bool:
        """Return whether another process has written the entry's payload (`arena.FillWriter`)."""
        view = self._views.get(entry.arena)
        return view is not None and is_valid(view.words, entry) and is_completed(view.words, entry)

    def close(self) -> None:
        """Unmap all arenas. Idempotent. Bytes that requests still hold stay readable until they release them."""
        for arena in list(self._views):
            self.detach(arena)


class InlineReceiver:
    def fetch(self, tensor: TensorDescriptor | InlineTensor) -> memoryview:
        if not isinstance(tensor, InlineTensor):
            raise HandoverFailed("a descriptor was given to the inline receiver")
        if len(tensor.data) != tensor.spec.nbytes:
            raise HandoverFailed("the bytes of an inline tensor are incomplete")
        return memoryview(tensor.data)
