"""The header of a feature: the fields of a processed item, without its large tensors (`vllm_bridge.items.features`)."""

from __future__ import annotations

import msgspec

from medialane.types.tensor import TensorSpec


class SmallTensor(msgspec.Struct, frozen=True, tag="small"):
    spec: TensorSpec
    data: bytes


class LargeTensor(msgspec.Struct, frozen=True, tag="large"):
    index: int
    spec: TensorSpec


class Scalar(msgspec.Struct, frozen=True, tag="scalar"):
    value: bool | int | float | str | None


class Nested(msgspec.Struct, frozen=True, tag="nested"):
    items: list[SmallTensor | LargeTensor | Scalar | Nested]


Value = SmallTensor | LargeTensor | Scalar | Nested

Slice = tuple[int | None, int | None, int | None]


class Batched(msgspec.Struct, frozen=True, tag="batched"):
    keep_on_cpu: bool = False


class Flat(msgspec.Struct, frozen=True, tag="flat"):
    slices: list[list[Slice]]
    nested: bool
    dim: int = 0
    keep_on_cpu: bool = False


class Shared(msgspec.Struct, frozen=True, tag="shared"):
    batch_size: int
    keep_on_cpu: bool = False


class Field(msgspec.Struct, frozen=True):
    name: str
    kind: Batched | Flat | Shared
    value: Value


class Header(msgspec.Struct, frozen=True):
    fields: list[Field]
