"""A feature's fields as torch tensors: large ones over the arena, small ones over its header."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from medialane.core.errors import InvalidFeature
from medialane.core.feature import Feature
from medialane.core.feature_header import Header, LargeTensor, Nested, Scalar, SmallTensor, Value
from medialane.core.tensor import ITEM_BYTES, TensorDescriptor, TensorSpec

_DECODER = msgspec.msgpack.Decoder(Header)
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}

# It does so once per process; these buffers are read-only on purpose.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
    torch.frombuffer(b"\0", dtype=torch.uint8)


def fields_of(
    feature: Feature, read: Callable[[TensorDescriptor], memoryview], views: list[torch.Tensor]
) -> dict[str, Any]:
    """Return the fields of a feature by name, and append each tensor to `views`. `read` returns the bytes of a
    tensor."""
    return {field.name: _value(field.value, feature, read, views) for field in _DECODER.decode(feature.header).fields}


def _value(
    value: Value, feature: Feature, read: Callable[[TensorDescriptor], memoryview], views: list[torch.Tensor]
) -> Any:
    match value:
        case LargeTensor(index):
            if not 0 <= index < len(feature.tensors):
                raise InvalidFeature(f"a feature's header names tensor {index} of {len(feature.tensors)}")
            return _view(value.spec, read(feature.tensors[index]), views)
        case SmallTensor(spec, data):
            return _view(spec, memoryview(data), views)
        case Scalar(plain):
            return plain
        case Nested(items):
            return [_value(inner, feature, read, views) for inner in items]


def _view(spec: TensorSpec, data: memoryview, views: list[torch.Tensor]) -> torch.Tensor:
    if data.nbytes != spec.nbytes:
        raise InvalidFeature(f"{data.nbytes} bytes for a tensor {spec.dtype} {spec.shape}")
    dtype = _DTYPES[spec.dtype]
    made = torch.frombuffer(data, dtype=dtype).view(spec.shape) if spec.nbytes else torch.empty(spec.shape, dtype=dtype)
    views.append(made)
    return made
