"""The two ends of a way to hand tensors over. What is handed over is always the tensors of one feature."""

from __future__ import annotations

from typing import Protocol

from medialane.core.feature import Feature
from medialane.core.request import TransportName
from medialane.core.tensor import InlineTensor, TensorDescriptor

HandedTensors = tuple[TensorDescriptor | InlineTensor, ...]


class Transport(Protocol):
    """The gateway's end."""

    @property
    def name(self) -> TransportName: ...

    def publish(self, feature: Feature) -> HandedTensors:
        """Put the feature's tensors into the form in which they travel.

        The caller holds a lease on the feature until the worker has released the request. Raises HandoverFailed.
        """
        ...


class Receiver(Protocol):
    """The worker's end."""

    def fetch(self, tensor: TensorDescriptor | InlineTensor) -> memoryview:
        """The tensor's bytes, valid until the request is released. Raises HandoverFailed."""
        ...
