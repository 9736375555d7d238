"""A feature's fields as torch tensors: large ones over the arena, small ones over its header."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

from medialane.types.errors import InvalidFeature
from medialane.types.feature import Feature, HeaderFields, LargeTensor, Nested, Scalar, SmallTensor, Value
from medialane.types.tensor import ITEM_BYTES, TensorDescriptor, TensorSpec

_DECODER = msgspec.msgpack.Decoder(HeaderFields)
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}

# It does so once per process; these buffers are read-only on purpose.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
    torch.frombuffer(b"\0", dtype=torch.uint8)


def fields_of(
    feature: Feature, read: Callable[[TensorDescriptor], memoryview], empty: list[Callable[[], object]]
) -> dict[str, Any]:
    """Return the fields of a feature by name, and append to `empty` what makes each tensor empty. `read` returns the
    bytes of a tensor."""
    return {field.name: _value(field.value, feature, read, empty) for field in _DECODER.decode(feature.header).fields}


def _value(
    value: Value, feature: Feature, read: Callable[[TensorDescriptor], memoryview], empty: list[Callable[[], object]]
) -> Any:
    match value:
        case LargeTensor(index):
            if not 0 <= index < len(feature.tensors):
                raise InvalidFeature(f"a feature's header names tensor {index} of {len(feature.tensors)}")
            return _view(value.spec, read(feature.tensors[index]), empty)
        case SmallTensor(spec, data):
            return _view(spec, memoryview(data), empty)
        case Scalar(plain):
            return plain
        case Nested(items):
            return [_value(inner, feature, read, empty) for inner in items]


def _view(spec: TensorSpec, data: memoryview, empty: list[Callable[[], object]]) -> torch.Tensor:
    if data.nbytes != spec.nbytes:
        raise InvalidFeature(f"{data.nbytes} bytes for a tensor {spec.dtype} {spec.shape}")
    dtype = _DTYPES[spec.dtype]
    made = torch.frombuffer(data, dtype=dtype).view(spec.shape) if spec.nbytes else torch.empty(spec.shape, dtype=dtype)
    empty.append(partial(made.set_, torch.empty(0, dtype=dtype)))
    return made
