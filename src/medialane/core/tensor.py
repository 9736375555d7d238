"""Tensors as facts: what they are, and where their bytes lie in an arena."""

from __future__ import annotations

from math import prod
from typing import Literal, get_args

import msgspec

Dtype = Literal["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]

#: Bytes of one element. A dtype that is not here is refused: guessing one would be silent garbage.
ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
assert set(ITEM_BYTES) == set(get_args(Dtype))  # noqa: S101 - the two tables above must agree; checked once at import

#: Tensors begin on a cache line, which every dtype's alignment divides.
ALIGNMENT = 64


def align(nbytes: int) -> int:
    """Round `nbytes` up to the alignment of tensors."""
    return (nbytes + ALIGNMENT - 1) & ~(ALIGNMENT - 1)


class TensorSpec(msgspec.Struct, frozen=True):
    """dtype and shape of a dense, C-contiguous tensor."""

    dtype: Dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(n < 0 for n in self.shape):
            raise ValueError(f"negative dimension in shape {self.shape}")

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class ArenaRange(msgspec.Struct, frozen=True):
    """One entry of one arena: bytes [offset, offset + nbytes), valid while the entry's generation word says so.

    `arena` names one incarnation of an arena (32 hex digits) and is never used again; `offset` points at the entry's
    header, which holds the generation; `nbytes` counts the header too.
    """

    arena: str
    offset: int
    nbytes: int
    generation: int


class TensorDescriptor(msgspec.Struct, frozen=True, tag="arena"):
    """Where a tensor's bytes lie: `offset` counts from the start of the entry `range`."""

    spec: TensorSpec
    range: ArenaRange
    offset: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.offset % ALIGNMENT or self.offset + self.spec.nbytes > self.range.nbytes:
            raise ValueError(f"tensor {self.spec} at {self.offset} does not lie inside its entry {self.range}")


class InlineTensor(msgspec.Struct, frozen=True, tag="inline"):
    """A tensor whose bytes travel with the message. `data` is empty while they travel beside it (`rpc.payload`)."""

    spec: TensorSpec
    data: memoryview

    def __post_init__(self) -> None:
        if len(self.data) not in (0, self.spec.nbytes):
            raise ValueError(f"{len(self.data)} bytes for a tensor {self.spec} of {self.spec.nbytes}")

    def __repr__(self) -> str:
        return f"InlineTensor({self.spec}, {len(self.data)} bytes)"
