"""Serialises vLLM's processed items to a header and large tensors, and back.

Theory of operation. A `MultiModalKwargsItem` maps field names to (nested) tensors and to a *field*, which specifies how
items are batched for the model. The header is a typed msgpack document of all of that in which tensors of up to
`INLINE_BYTES` are inline, and also larger ones if prompt assembly or validation read them (`header_values` finds that
out); others are indices into a list of tensors sent separately. So the header suffices to expand a prompt: the others
are replaced by stand-ins then, whose values cannot be read. Nothing is pickled; field kinds and dtypes are closed
tables.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import torch
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)

from medialane.types.errors import FeatureUnsupported, InvalidFeature
from medialane.types.feature import (
    MAX_HEADER_BYTES,
    Batched,
    Field,
    Flat,
    HeaderFields,
    LargeTensor,
    Nested,
    Scalar,
    Shared,
    SmallTensor,
    Value,
)
from medialane.types.tensor import ITEM_BYTES, TensorSpec
from medialane.vllm_bridge.seams.stand_ins import stand_in_for

#: Largest tensor that is always inline in the header. An audio mask of 30 s is 12 kB.
INLINE_BYTES = 16 * 1024

#: Levels of lists in a field; vLLM's processors give up to two.
MAX_DEPTH = 8

#: Largest header whose decoded form is cached.
_CACHED_BYTES = 4096

# torch has no read-only tensors and warns once per process, at the first buffer that is not writable. We use read-only
# mappings on purpose: a write to an item is a bug, and SIGSEGV is better than corrupting another request.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
    torch.frombuffer(b"\0", dtype=torch.uint8)

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


_DECODER = msgspec.msgpack.Decoder(HeaderFields)
_ENCODER = msgspec.msgpack.Encoder()


def encode_item(
    item: MultiModalKwargsItem, inline: Collection[str] = ()
) -> tuple[bytes, tuple[TensorSpec, ...], tuple[memoryview, ...]]:
    """Split one processed item into its header, which has all tensors of the `inline` fields, and its large tensors.

    Returns the header, and per large tensor its spec and its bytes (C-contiguous, valid as long as the memoryview).
    Raises FeatureUnsupported for an unsupported dtype, value or field kind.
    """
    large: list[torch.Tensor] = []
    limits = {name: MAX_HEADER_BYTES if name in inline else INLINE_BYTES for name in item}
    fields = [Field(name, _kind(elem.field), _value(elem.data, large, limits[name])) for name, elem in item.items()]
    specs = tuple(spec_of(t) for t in large)
    return _ENCODER.encode(HeaderFields(fields)), specs, tuple(_bytes(t) for t in large)


def small_values(header: bytes) -> dict[str, bytes]:
    """Return the fields whose values are in the header, encoded, by name."""
    fields = _DECODER.decode(header).fields
    return {
        field.name: _ENCODER.encode(field.value)
        for field in fields
        if any(isinstance(one, Scalar) or (isinstance(one, SmallTensor) and one.data) for one in _leaves(field.value))
    }


def large_tensors(header: bytes) -> dict[str, list[int]]:
    """Return the indices of each field's large tensors, by name."""
    return {field.name: [one.index for one in _large(field.value)] for field in _DECODER.decode(header).fields}


def named_values(
    header: bytes, tensors: Sequence[memoryview]
) -> tuple[dict[str, tuple[TensorSpec, memoryview]], dict[str, object]]:
    """Return all tensors of an item and their bytes, and its other values, by name; tensors of a field that is a list
    have its name and their place, `field.0`. Raises InvalidFeature."""
    found: dict[str, tuple[TensorSpec, memoryview]] = {}
    others: dict[str, object] = {}

    def add(name: str, value: Value) -> None:
        match value:
            case SmallTensor():
                found[name] = value.spec, memoryview(value.data)
            case LargeTensor():
                found[name] = value.spec, _bytes_of(value, tensors)
            case Scalar():
                others[name] = value.value
            case Nested():
                for number, inner in enumerate(value.items):
                    add(f"{name}.{number}", inner)

    for field in _DECODER.decode(header).fields:
        add(field.name, field.value)
    return found, others


def without_values(header: bytes, names: Collection[str]) -> bytes:
    """Return the header without the values of these fields; their dtypes and shapes are kept."""
    fields = [
        Field(one.name, one.kind, _emptied(one.value) if one.name in names else one.value)
        for one in _DECODER.decode(header).fields
    ]
    return _ENCODER.encode(HeaderFields(fields))


def decode_item(header: bytes, tensors: Sequence[memoryview]) -> MultiModalKwargsItem:
    """Rebuild an item over these bytes, without a copy. Raises InvalidFeature if they do not match the header."""
    return _rebuild(header, lambda large: tensor_over(large.spec, _bytes_of(large, tensors)))


def check_tensors(header: bytes, tensors: Sequence[memoryview]) -> None:
    """Raise InvalidFeature if `decode_item` would, without building the item."""
    for large in _template(header).large:
        _bytes_of(large, tensors)


def decode_small_fields(header: bytes) -> MultiModalKwargsItem:
    """Return an item that has only its complete fields, for an engine that loads its embedding: positions depend on
    small fields (a grid), the rest is read by the encoder alone."""
    return MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(data=value, field=field)
            for name, field, value, is_complete in _template(header).fields
            if is_complete
        }
    )


def decode_item_without_tensors(header: bytes) -> MultiModalKwargsItem:
    """Rebuild an item for prompt assembly and validation: large tensors are stand-ins of the same dtype and shape."""
    return _rebuild(header, lambda large: stand_in_for(_DTYPES[large.spec.dtype], large.spec.shape))


class _Field(NamedTuple):
    """A field of all items with one header. `value` is complete, or a tree that refers to large tensors."""

    name: str
    field: BaseMultiModalField
    value: Any
    is_complete: bool


class _Template(NamedTuple):
    """A decoded header. `large` are the tensors that it does not contain."""

    fields: tuple[_Field, ...]
    large: tuple[LargeTensor, ...]


def _template(header: bytes) -> _Template:
    return _cached_template(header) if len(header) <= _CACHED_BYTES else _new_template(header)


def _new_template(header: bytes) -> _Template:
    if len(header) > MAX_HEADER_BYTES:
        raise InvalidFeature(f"a feature's header has {len(header)} bytes, more than {MAX_HEADER_BYTES}")
    try:
        fields = _DECODER.decode(header).fields
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidFeature("a feature's header cannot be read") from error
    large: list[LargeTensor] = []
    return _Template(tuple(_read_field(field, large) for field in fields), tuple(large))


def _read_field(field: Field, large: list[LargeTensor]) -> _Field:
    external = _large(field.value)
    large += external
    value = field.value if external else _nested(field.value, _no_large)
    return _Field(field.name, _field(field.kind), value, is_complete=not external)


def _emptied(value: Value) -> Value:
    match value:
        case Nested():
            return Nested([_emptied(inner) for inner in value.items])
        case SmallTensor():
            return SmallTensor(value.spec, b"")
        case _:
            return Scalar(None) if isinstance(value, Scalar) else value


# Images of equal size have equal headers. Their items share its small tensors, like items in vLLM's processor cache.
_cached_template = lru_cache(maxsize=512)(_new_template)


def _leaves(value: Value) -> Iterator[SmallTensor | LargeTensor | Scalar]:
    """Yield what a value has, in any list of it. Raises InvalidFeature for deeper nesting than processors give."""
    level = [value]
    for _ in range(MAX_DEPTH):
        yield from (one for one in level if not isinstance(one, Nested))
        level = [inner for one in level if isinstance(one, Nested) for inner in one.items]
    if level:
        raise InvalidFeature(f"a field of a feature has more than {MAX_DEPTH} levels")


def _large(value: Value) -> list[LargeTensor]:
    return [one for one in _leaves(value) if isinstance(one, LargeTensor)]


def _no_large(large: LargeTensor) -> torch.Tensor:
    raise AssertionError(f"a value without large tensors has {large}")


def _rebuild(header: bytes, large: Callable[[LargeTensor], torch.Tensor]) -> MultiModalKwargsItem:
    return MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(data=value if is_complete else _nested(value, large), field=field)
            for name, field, value, is_complete in _template(header).fields
        }
    )


def _nested(value: Value, large: Callable[[LargeTensor], torch.Tensor]) -> Any:
    if isinstance(value, LargeTensor):
        return large(value)
    if isinstance(value, SmallTensor):
        return tensor_over(value.spec, memoryview(value.data))
    if isinstance(value, Scalar):
        return value.value
    return [_nested(inner, large) for inner in value.items]


def _bytes_of(large: LargeTensor, tensors: Sequence[memoryview]) -> memoryview:
    if not 0 <= large.index < len(tensors):
        raise InvalidFeature(f"a feature's header names tensor {large.index} of {len(tensors)}")
    if large.spec.nbytes <= INLINE_BYTES:
        # Equal headers must imply equal small tensors: `placeholder_layout` and `validation` rely on that.
        raise InvalidFeature(f"a tensor of {large.spec.nbytes} bytes is outside its feature's header")
    data = tensors[large.index]
    _check_size(large.spec, data)
    return data


def _check_size(spec: TensorSpec, data: memoryview) -> None:
    if data.nbytes != spec.nbytes:
        raise InvalidFeature(f"{data.nbytes} bytes for a tensor {spec.dtype} {spec.shape}")


def tensor_over(spec: TensorSpec, data: memoryview) -> torch.Tensor:
    """A tensor whose memory is `data`. Raises InvalidFeature when sizes differ, KeyError for a dtype we do not have."""
    _check_size(spec, data)
    dtype = _DTYPES[spec.dtype]
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(spec.shape)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Return a tensor's spec. Raises FeatureUnsupported for an unsupported dtype."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise FeatureUnsupported(f"the processor gave a tensor of dtype {tensor.dtype}, which has no wire form")
    return TensorSpec(name, tuple(tensor.shape))  # type: ignore[arg-type]  # _NAMES holds exactly the Dtype literals


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _value(data: Any, large: list[torch.Tensor], inline_bytes: int) -> Value:
    """Append tensors of more than `inline_bytes` to `large`."""
    if isinstance(data, torch.Tensor):
        if data.nbytes <= inline_bytes:
            return SmallTensor(spec_of(data), bytes(_bytes(data)))
        large.append(data)
        return LargeTensor(len(large) - 1, spec_of(data))
    if data is None or isinstance(data, int | float | str):
        return Scalar(data)
    if isinstance(data, list | tuple):
        return Nested([_value(inner, large, inline_bytes) for inner in data])
    raise FeatureUnsupported(f"the processor gave a {type(data).__name__}, which has no wire form")


def _kind(field: BaseMultiModalField) -> Batched | Flat | Shared:
    if isinstance(field, MultiModalBatchedField):
        return Batched(field.keep_on_cpu)
    if isinstance(field, MultiModalSharedField):
        return Shared(field.batch_size, field.keep_on_cpu)
    if isinstance(field, MultiModalFlatField):
        nested = bool(field.slices) and not isinstance(field.slices[0], slice)
        rows: Any = field.slices if nested else [[s] for s in field.slices]
        slices = [[(_int(s.start), _int(s.stop), _int(s.step)) for s in row] for row in rows]
        return Flat(slices, nested, field.dim, field.keep_on_cpu)
    raise FeatureUnsupported(f"the processor gave a field of kind {type(field).__name__}, which has no wire form")


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


def _field(kind: Batched | Flat | Shared) -> BaseMultiModalField:
    if isinstance(kind, Batched):
        return MultiModalBatchedField(keep_on_cpu=kind.keep_on_cpu)
    if isinstance(kind, Shared):
        return MultiModalSharedField(batch_size=kind.batch_size, keep_on_cpu=kind.keep_on_cpu)
    rows = [[slice(*s) for s in row] for row in kind.slices]
    slices: Any = rows if kind.nested else [row[0] for row in rows]
    return MultiModalFlatField(slices=slices, dim=kind.dim, keep_on_cpu=kind.keep_on_cpu)
