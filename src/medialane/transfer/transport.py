"""Transports of tensors from a gateway to a worker: those of a feature, of decoded media, or encoded bytes as one.

A transport has two ends. The gateway's converts the tensors of an arena entry to the form that is sent, the worker's
converts that form to readable bytes.

* `shm`, same host: the descriptor is sent, both ends map the arena, no byte is copied.
* `inline`, any host, small tensors: the bytes are sent with the request message, copied once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from medialane.arena import ArenaView
from medialane.core.errors import HandoverFailed
from medialane.core.stage import TransportName
from medialane.core.tensor import InlineTensor, TensorDescriptor

TransferTensors = tuple[TensorDescriptor | InlineTensor, ...]


class Transport(Protocol):
    """The gateway's end."""

    @property
    def name(self) -> TransportName: ...

    def publish(self, tensors: tuple[TensorDescriptor, ...]) -> TransferTensors:
        """Convert the tensors of one arena entry to the form that is sent.

        The caller holds a lease on the entry until the worker has released the request. Raises HandoverFailed.
        """
        ...


class Receiver(Protocol):
    """The worker's end."""

    def fetch(self, tensor: TensorDescriptor | InlineTensor) -> memoryview:
        """Return the tensor's bytes, valid until the request is released. Raises HandoverFailed."""
        ...


class ShmTransport:
    name: TransportName = "shm"

    def publish(self, tensors: tuple[TensorDescriptor, ...]) -> TransferTensors:
        return tensors


class ShmReceiver:
    """Maps the arenas of gateways on this host, read-only, and reads from them. The owner calls `close`."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._views: dict[str, ArenaView] = {}

    def attach(self, arena: str, nonce: bytes) -> bool:
        """Map the arena. True if it contains the nonce, which proves that the gateway is on the same host. Idempotent.

        A wrong nonce changes nothing: the mapping may be in use for another gateway.
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
        """Unmap the arena: its gateway no longer sends descriptors of it. Idempotent."""
        if (view := self._views.pop(arena, None)) is not None:
            view.close()

    def fetch(self, tensor: TensorDescriptor | InlineTensor) -> memoryview:
        if not isinstance(tensor, TensorDescriptor):
            raise HandoverFailed("an inline tensor was given to the shm receiver")
        view = self._views.get(tensor.range.arena)
        if view is None:
            raise HandoverFailed("the tensor is in an arena that this worker has not mapped")
        return view.tensor(tensor)

    def close(self) -> None:
        """Unmap all arenas. Idempotent. Bytes that requests still hold stay readable until they release them."""
        for arena in list(self._views):
            self.detach(arena)


class InlineTransport:
    """`read` returns the bytes of a descriptor in this process, the arena's owner."""

    name: TransportName = "inline"

    def __init__(self, read: Callable[[TensorDescriptor], memoryview], *, max_bytes: int) -> None:
        self._read = read
        self._max_bytes = max_bytes

    def publish(self, tensors: tuple[TensorDescriptor, ...]) -> TransferTensors:
        nbytes = sum(t.spec.nbytes for t in tensors)
        if nbytes > self._max_bytes:
            raise HandoverFailed(f"tensors of {nbytes} bytes exceed the inline limit of {self._max_bytes} bytes")
        return tuple(InlineTensor(t.spec, self._read(t)) for t in tensors)


class InlineReceiver:
    def fetch(self, tensor: TensorDescriptor | InlineTensor) -> memoryview:
        if not isinstance(tensor, InlineTensor):
            raise HandoverFailed("a descriptor was given to the inline receiver")
        if len(tensor.data) != tensor.spec.nbytes:
            raise HandoverFailed("the bytes of an inline tensor are incomplete")
        return memoryview(tensor.data)
