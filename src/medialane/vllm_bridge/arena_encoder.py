"""The front end's end of the zero-copy hand-over: which tensors EngineCore can map by itself (see `arena_decoder`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.v1.serial_utils import OOBTensorConsumer

from medialane.core.tensor import TensorDescriptor
from medialane.vllm_bridge.arena_decoder import META


class ArenaConsumer(OOBTensorConsumer):  # type: ignore[misc]  # vllm is not typed
    """Replaces tensors by descriptors while `offering` them; every other tensor goes to `inner`, if there is one."""

    def __init__(self, inner: OOBTensorConsumer | None) -> None:
        self._inner = inner
        self._offered: dict[int, list[TensorDescriptor]] = {}

    @contextmanager
    def offering(self, tensors: Sequence[tuple[TensorDescriptor, memoryview]]) -> Iterator[None]:
        """While it lasts, a tensor over the very bytes of one of `tensors` is sent as that descriptor.

        Two requests may offer the same entry at the same time. The bytes must stay where they are meanwhile.
        """
        addresses = [address_of(data) for _, data in tensors]
        for address, (descriptor, _) in zip(addresses, tensors, strict=True):
            self._offered.setdefault(address, []).append(descriptor)
        try:
            yield
        finally:
            for address, (descriptor, _) in zip(addresses, tensors, strict=True):
                self._offered[address].remove(descriptor)
                if not self._offered[address]:
                    del self._offered[address]

    def __call__(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        for descriptor in self._offered.get(tensor.data_ptr(), ()):
            if descriptor.spec.nbytes == tensor.nbytes and tensor.is_contiguous():
                entry = descriptor.range
                return {META: [entry.arena, entry.offset, entry.nbytes, entry.generation, descriptor.offset]}
        return None if self._inner is None else self._inner(tensor)

    def new_message(self) -> None:
        if self._inner is not None:
            self._inner.new_message()


def address_of(data: memoryview) -> int:
    """Where in this process's memory the bytes begin."""
    return int(np.frombuffer(data, np.uint8).ctypes.data)
