"""The two ends of a way to hand tensors over: those of one feature, of decoded media, or the encoded bytes as one."""

from __future__ import annotations

from typing import Protocol

from medialane.core.request import TransportName
from medialane.core.tensor import InlineTensor, TensorDescriptor

HandedTensors = tuple[TensorDescriptor | InlineTensor, ...]


class Transport(Protocol):
    """The gateway's end."""

    @property
    def name(self) -> TransportName: ...

    def publish(self, tensors: tuple[TensorDescriptor, ...]) -> HandedTensors:
        """Put the tensors of one entry of the arena into the form in which they travel.

        The caller holds a lease on the entry until the worker has released the request. Raises HandoverFailed.
        """
        ...


class Receiver(Protocol):
    """The worker's end."""

    def fetch(self, tensor: TensorDescriptor | InlineTensor) -> memoryview:
        """The tensor's bytes, valid until the request is released. Raises HandoverFailed."""
        ...
