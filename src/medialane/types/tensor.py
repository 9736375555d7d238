"""Tensor metadata and locations in an arena; embeddings that a client sends instead of a media item (vLLM's
`image_embeds` and the like); how the tensors of one item differ between two processors."""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from medialane.types.errors import InvalidFeature

Dtype = Literal[
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip

#: Bytes per element. Other dtypes are rejected: a wrong guess would silently corrupt data.
ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
assert set(ITEM_BYTES) == set(get_args(Dtype))  # noqa: S101 - the two tables above must agree; checked once at import

#: Bounds of what another process may say about a tensor. numpy and vLLM's models have fewer dimensions, and a host less
#: memory; with both, the product of a shape is a matter of nanoseconds.
MAX_RANK = 16
MAX_TENSOR_BYTES = 1 << 48
#: Of one media item: a list of frames or crops has one tensor for each.
MAX_TENSORS = 2048

#: msgspec checks the length before it decodes an element.
Shape = Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_TENSOR_BYTES)], ...], Meta(max_length=MAX_RANK)]
#: A position or number of bytes.
ByteCount = Annotated[int, Meta(ge=0)]

#: Tensors are aligned to cache lines, a multiple of every dtype's alignment.
ALIGNMENT = 64


def align(nbytes: int) -> int:
    """Round `nbytes` up to the alignment of tensors."""
    return (nbytes + ALIGNMENT - 1) & ~(ALIGNMENT - 1)


class TensorSpec(msgspec.Struct, frozen=True):
    """dtype and shape of a dense, C-contiguous tensor. Constructed or decoded, it is within the bounds above."""

    dtype: Dtype
    shape: Shape

    def __post_init__(self) -> None:
        if len(self.shape) > MAX_RANK:
            raise ValueError(f"a shape of {len(self.shape)} dimensions, more than {MAX_RANK}")
        if not all(0 <= n <= MAX_TENSOR_BYTES for n in self.shape):
            raise ValueError(f"negative dimension in shape {self.shape}, or one above {MAX_TENSOR_BYTES}")
        if self.nbytes > MAX_TENSOR_BYTES:
            raise ValueError(f"a tensor of shape {self.shape} has more than {MAX_TENSOR_BYTES} bytes")

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class ArenaRange(msgspec.Struct, frozen=True):
    """One entry of one arena: bytes [offset, offset + nbytes), valid while the entry's header has this generation.

    `arena` identifies one incarnation of an arena (32 hex digits) and is never reused; `offset` is the offset of the
    entry's header, which holds the generation; `nbytes` includes the header.
    """

    arena: str
    offset: ByteCount
    nbytes: ByteCount
    generation: int


class ArenaOffer(msgspec.Struct, frozen=True, array_like=True):
    """The arena of a host's store: a process of the same host maps it and verifies the nonce in its header."""

    id: str
    nonce: bytes


class TensorDescriptor(msgspec.Struct, frozen=True, tag="arena"):
    """Location of a tensor: `offset` is relative to the start of the entry `range`."""

    spec: TensorSpec
    range: ArenaRange
    offset: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.offset % ALIGNMENT or self.offset + self.spec.nbytes > self.range.nbytes:
            raise ValueError(f"tensor {self.spec} at {self.offset} is not inside its entry {self.range}")


#: The tensors of one media item.
TensorDescriptors = Annotated[tuple[TensorDescriptor, ...], Meta(max_length=MAX_TENSORS)]


class InlineTensor(msgspec.Struct, frozen=True, tag="inline"):
    """A tensor sent by value. `data` is empty while its bytes are sent in separate frames (`wire.payload`)."""

    spec: TensorSpec
    data: memoryview

    def __post_init__(self) -> None:
        if len(self.data) not in (0, self.spec.nbytes):
            raise ValueError(f"{len(self.data)} bytes for a tensor {self.spec} of {self.spec.nbytes}")

    def __repr__(self) -> str:
        return f"InlineTensor({self.spec}, {len(self.data)} bytes)"


SentTensors = Annotated[tuple[TensorDescriptor | InlineTensor, ...], Meta(max_length=MAX_TENSORS)]


#: From the smallest difference to the largest.
#: `equal`: dtype, shape and every bit. `cast`: the same numbers in another dtype, if necessary rounded to the smaller.
#: `normalised`: one has raw pixels (uint8), and equals the other once they are normalised. `missing`: one has no such
#: field.
Relation = Literal["equal", "cast", "normalised", "differs", "shape", "missing"]


class Comparison(msgspec.Struct, frozen=True):
    """`largest` is the largest absolute difference of two numbers at the same place; 0 if they cannot be compared."""

    relation: Relation
    largest: float = 0.0


class FieldComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One field of an item. `plain` (vLLM's own), `ours` and `hugging_face` are dtype and shape, empty if the field is
    missing. Comparisons are with plain vLLM's; `of_hugging_face` is None if that made nothing of the item."""

    name: str
    plain: str
    ours: str
    hugging_face: str
    of_ours: Comparison
    of_hugging_face: Comparison | None


class PixelNormalisation(msgspec.Struct, frozen=True):
    """What vLLM's engine does to raw pixels on its device: (pixel * rescale_factor - mean) / std, for each channel."""

    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


#: `MediaPayload.media_type` and `EncodedMedia.media_type` of an `Embeds` document. Sniffing never returns it.
EMBEDS_TYPE = "application/x-medialane-embeds"

#: The field name of embeddings sent as one tensor instead of an object of named tensors.
UNNAMED = ""

#: Prefix of a document, so that its content hash differs from any media file's.
_MAGIC = b"medialane-embeds-1\0"


class EmbedsTensor(msgspec.Struct, frozen=True):
    """One tensor by value: C-contiguous bytes, little-endian."""

    spec: TensorSpec
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != self.spec.nbytes:
            raise ValueError(f"{len(self.data)} bytes for a tensor {self.spec} of {self.spec.nbytes}")

    def __repr__(self) -> str:
        return f"EmbedsTensor({self.spec})"


class Embeds(msgspec.Struct, frozen=True):
    """One item's embeddings: tensors by name, or a single one under `UNNAMED`."""

    fields: dict[str, EmbedsTensor]


_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decode = msgspec.msgpack.Decoder(Embeds).decode


def encode_embeds(embeds: Embeds) -> bytes:
    """Encode `embeds` deterministically: equal embeddings give equal bytes."""
    return _MAGIC + _encode(embeds)


def decode_embeds(data: bytes | memoryview) -> Embeds:
    """Decode a document of `encode_embeds`. Raises InvalidFeature for any other bytes."""
    view = memoryview(data)
    if view[: len(_MAGIC)] != _MAGIC:
        raise InvalidFeature("unknown format of embeddings")
    try:
        return _decode(view[len(_MAGIC) :])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidFeature("malformed embeddings") from error
