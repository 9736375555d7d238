"""Large tensors in pieces, so that they do not block the event loops: the inline tensors of a request, in raw frames
before its message, and the output of a pooling request, in parts.

Encoding and decoding one message of 19 MiB with msgpack blocked the two loops for 48 ms. So such a request is sent as

    Payload(sizes)                        sizes of its tensors, in the prompt's order; the worker allocates memory
    raw frames                            their bytes, up to PIECE_BYTES in each; none belongs to two tensors
    Submit(request, with_payload=True)    the request, its tensors without bytes

A connection has one payload at a time; other messages may be interleaved with its frames. A request that is cancelled
while it is sent ends with DropPayload. The gateway copies each piece just before it is sent, directly from the tensor,
and the worker copies it to its final location: no msgpack and no buffer of the whole payload.

`PooledOutput` assembles the output of a pooling request from the parts in which it is sent. The embeddings of all
tokens of a long prompt take many MB: in one message they would block both event loops. Parts are copied to their final
location as they arrive, so none is queued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import msgspec
import numpy as np

from medialane.types.errors import GenerationFailed, InvalidFeature, ProtocolViolation, TooLarge
from medialane.types.feature import MediaPayload
from medialane.types.request import EngineRequest, ExpandedPrompt, OutputDelta, PooledPart, Prompt
from medialane.types.tensor import InlineTensor, TensorDescriptor
from medialane.wire.connection import append_frame, append_raw_frame
from medialane.wire.protocol import DropPayload, Payload, Submit

#: A frame that fits into one read of a socket (uvloop: 250 KiB) is copied without being buffered first.
PIECE_BYTES = 64 * 1024

#: Pieces written per iteration of the event loop: 0.1 ms.
PIECES_AT_ONCE = 4

NO_BYTES = memoryview(b"")


def split(request: EngineRequest) -> tuple[EngineRequest, list[memoryview]]:
    """Return the request without the bytes of its inline tensors, and the bytes, in order, of those not empty."""
    inline = [t for item in request.prompt.media for t in item.tensors if isinstance(t, InlineTensor)]
    tensors = [memoryview(tensor.data) for tensor in inline if len(tensor.data)]
    if not tensors:
        return request, []
    media = tuple(
        msgspec.structs.replace(item, tensors=tuple(map(_emptied, item.tensors))) for item in request.prompt.media
    )
    return _with_media(request, media), tensors


def join(request: EngineRequest, tensors: Sequence[memoryview]) -> EngineRequest:
    """Reverse `split`. Raises InvalidFeature if `tensors` do not match the request's."""
    rest = iter(tensors)
    try:
        media = tuple(
            msgspec.structs.replace(item, tensors=tuple(_filled(tensor, rest) for tensor in item.tensors))
            for item in request.prompt.media
        )
    except ValueError as error:
        raise InvalidFeature("the payload does not match the request's tensors") from error
    if next(rest, None) is not None:
        raise InvalidFeature("the payload has more tensors than the request")
    return _with_media(request, media)


class OutgoingRequest:
    """A request being sent in pieces (a `connection.PieceSource`).

    `on_end` is called once, when the tensors are no longer read: all were sent, or `cancel` was called. Raises
    ProtocolViolation if the request with its tensors is larger than allowed.
    """

    def __init__(
        self,
        request: EngineRequest,
        tensors: Sequence[memoryview],
        on_end: Callable[[], None],
        *,
        max_bytes: int,
    ) -> None:
        self._submit = bytearray()
        self._max_bytes = max_bytes
        self._sizes = [tensor.nbytes for tensor in tensors]
        self.num_bytes_left = sum(self._sizes)
        if self.num_bytes_left >= max_bytes:  # a raw frame has one byte more than its data
            raise ProtocolViolation(f"{self.num_bytes_left} bytes of tensors exceed the limit of {max_bytes}")
        append_frame(self._submit, Submit(request, with_payload=True), max_bytes)
        self._pieces = _pieces(tensors)
        self._on_end = on_end
        self._begun = self._cancelled = False

    def append_next(self, buffer: bytearray) -> bool:
        if self._cancelled:
            if self._begun:
                append_frame(buffer, DropPayload(), self._max_bytes)
            return False
        if not self._begun:
            self._begun = True
            append_frame(buffer, Payload(self._sizes), self._max_bytes)
        for piece in islice(self._pieces, PIECES_AT_ONCE):
            append_raw_frame(buffer, piece)
            self.num_bytes_left -= piece.nbytes
        if self.num_bytes_left:
            return True
        buffer += self._submit
        self._end()
        return False

    def cancel(self) -> None:
        """Stop sending. Must not be called after `on_end`."""
        self._cancelled = True
        self._end()

    def _end(self) -> None:
        self.num_bytes_left = 0
        self._pieces = iter(())
        self._on_end()


class IncomingPayload:
    """The payload of one connection at the worker. Its memory is bounded by `max_bytes`, and owned by the request after
    `take`. All methods raise ProtocolViolation for frames out of order."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tensors: list[memoryview] = []
        self._number = self._filled = 0

    def begin(self, sizes: Sequence[int]) -> None:
        if self._tensors:
            raise ProtocolViolation("a payload inside another")
        if not sizes or min(sizes) < 1 or sum(sizes) >= self._max_bytes:
            raise ProtocolViolation(f"a payload of {sum(sizes)} bytes was announced, {self._max_bytes} are allowed")
        # np.empty does not clear memory, which would block the event loop, and its memory is aligned.
        self._tensors = [np.empty(size, np.uint8).data for size in sizes]
        self._number = self._filled = 0

    def add(self, piece: memoryview) -> None:
        if self._number == len(self._tensors):
            raise ProtocolViolation("raw data without a tensor")
        tensor, end = self._tensors[self._number], self._filled + piece.nbytes
        if end > tensor.nbytes:
            raise ProtocolViolation("more raw data than the tensor has bytes")
        tensor[self._filled : end] = piece
        self._filled = end
        if end == tensor.nbytes:
            self._number, self._filled = self._number + 1, 0

    def take(self) -> list[memoryview]:
        """Return the complete tensors, read-only."""
        if not self._tensors or self._number < len(self._tensors):
            raise ProtocolViolation("a request before all of its tensors")
        tensors = [tensor.toreadonly() for tensor in self._tensors]
        self.drop()
        return tensors

    def drop(self) -> None:
        self._tensors = []
        self._number = self._filled = 0


def _pieces(tensors: Sequence[memoryview]) -> Iterator[memoryview]:
    for tensor in tensors:
        for start in range(0, tensor.nbytes, PIECE_BYTES):
            yield tensor[start : start + PIECE_BYTES]


def _emptied(tensor: TensorDescriptor | InlineTensor) -> TensorDescriptor | InlineTensor:
    return InlineTensor(tensor.spec, NO_BYTES) if isinstance(tensor, InlineTensor) else tensor


def _filled(tensor: TensorDescriptor | InlineTensor, rest: Iterator[memoryview]) -> TensorDescriptor | InlineTensor:
    if not isinstance(tensor, InlineTensor) or len(tensor.data) == tensor.spec.nbytes:
        return tensor
    return InlineTensor(tensor.spec, next(rest, NO_BYTES))


def _with_media(request: EngineRequest, media: tuple[MediaPayload, ...]) -> EngineRequest:
    prompt: Prompt = request.prompt
    name = "features" if isinstance(prompt, ExpandedPrompt) else "media"
    return msgspec.structs.replace(request, prompt=msgspec.structs.replace(prompt, **{name: media}))


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
