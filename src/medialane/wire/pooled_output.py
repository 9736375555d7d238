"""Assembles the output of a pooling request from the parts in which it is sent.

The embeddings of all tokens of a long prompt take many MB: in one message they would block both event loops. Parts are
copied to their final location as they arrive, so none is queued.
"""

from __future__ import annotations

import msgspec
import numpy as np

from medialane.types.errors import GenerationFailed, TooLarge
from medialane.types.request import OutputDelta, PooledPart


def check_size(part: PooledPart, max_bytes: int) -> None:
    """Raise TooLarge for a part of a tensor of more than `max_bytes`."""
    if part.spec.nbytes > max_bytes:
        raise TooLarge(f"the output has {part.spec.nbytes} bytes, more than {max_bytes} (--rpc-max-pooled-bytes)")


class PooledOutput:
    """The output of one request, of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._first: OutputDelta | None = None
        self._whole: PooledPart | None = None
        self._num_bytes = 0

    def add(self, delta: OutputDelta) -> OutputDelta | None:
        """Add the next delta; return one with the whole tensor after the last one. Raises TooLarge, GenerationFailed if
        the parts do not make up a tensor."""
        part = delta.pooled
        if part is None:
            raise GenerationFailed("the worker's output has no tensor")
        if self._first is None or self._whole is None:
            check_size(part, self._max_bytes)
            self._first = delta
            # np.empty does not clear memory, which would block the event loop.
            self._whole = PooledPart(part.spec, np.empty(part.spec.nbytes, np.uint8).data)
        end = self._num_bytes + part.data.nbytes
        if part.spec != self._whole.spec or end > part.spec.nbytes or delta.finished != (end == part.spec.nbytes):
            raise GenerationFailed("the parts of the worker's output do not make up a tensor")
        self._whole.data[self._num_bytes : end] = part.data
        self._num_bytes = end
        return msgspec.structs.replace(self._first, pooled=self._whole, finished=True) if delta.finished else None
