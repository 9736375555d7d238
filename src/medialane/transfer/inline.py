"""Any host, small features: the bytes travel with the request message, copied once they are sent."""

from __future__ import annotations

from collections.abc import Callable

from medialane.core.errors import HandoverFailed
from medialane.core.request import TransportName
from medialane.core.tensor import InlineTensor, TensorDescriptor
from medialane.transfer.transport import HandedTensors


class InlineTransport:
    """`read` gives the bytes of a descriptor in this process (the arena's owner has them mapped)."""

    name: TransportName = "inline"

    def __init__(self, read: Callable[[TensorDescriptor], memoryview], *, max_bytes: int) -> None:
        self._read = read
        self._max_bytes = max_bytes

    def publish(self, tensors: tuple[TensorDescriptor, ...]) -> HandedTensors:
        nbytes = sum(t.spec.nbytes for t in tensors)
        if nbytes > self._max_bytes:
            raise HandoverFailed(f"tensors of {nbytes} bytes are more than {self._max_bytes} bytes inline")
        return tuple(InlineTensor(t.spec, self._read(t)) for t in tensors)


class InlineReceiver:
    def fetch(self, tensor: TensorDescriptor | InlineTensor) -> memoryview:
        if not isinstance(tensor, InlineTensor):
            raise HandoverFailed("a descriptor was given to the inline receiver")
        if len(tensor.data) != tensor.spec.nbytes:
            raise HandoverFailed("the bytes of an inline tensor have not come")
        return memoryview(tensor.data)
