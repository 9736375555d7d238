"""Converts embeddings in a request to one `Embeds` document: arrays of numbers, or base64 of single tensors written by
`torch.save` or `numpy.save`, which are read without unpickling.

Theory of operation. `torch.save` writes a zip archive of stored (uncompressed) records: `data.pkl`, a pickle of about
150 bytes that describes the tensor's layout in its storage, and `data/0`, the storage. Even
`torch.load(weights_only=True)` is unsafe for untrusted bytes: it calls functions named by the pickle (among them
`bytearray` of any length), inflates compressed records, and makes tensors of any shape over one element. Here a pickle
is read as a tree of numbers, strings and tuples, of some twenty opcodes, and compared with the calls that describe a
tensor. Nothing is imported, hashed or called. All lengths are checked against the bytes received.

torch's old format (before 1.6), sparse tensors, subclasses and expanded views are rejected.
"""

from __future__ import annotations

import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np

from medialane.media.data_url import decode_base64
from medialane.types.errors import InvalidEmbeds, MedialaneError
from medialane.types.tensor import ITEM_BYTES, UNNAMED, Embeds, EmbedsTensor, TensorSpec, encode_embeds

Bytes = bytes | bytearray | memoryview

#: Model families use two or three fields.
MAX_FIELDS = 8
#: Arrays of numbers are used for grids and sizes; embeddings are sent as tensors.
MAX_NUMBERS = 64

_decode_numbers = msgspec.json.Decoder(list[int | float]).decode

#: A tensor's pickle has about 200 bytes; a few kB take milliseconds here.
MAX_PICKLE_BYTES = 4096
#: torch writes seven records.
MAX_RECORDS = 32
MAX_DIMS = 8

_NPY_MAGIC = b"\x93NUMPY"
#: After magic, version and length; the length has two bytes in version 1.0.
_NPY_HEADER_AT = 10
#: Little-endian or single-byte types; sizes of up to twelve digits.
_NPY_HEADER = re.compile(
    rb"\{'descr': '([<|]\w{2,3})', 'fortran_order': (True|False), 'shape': \(((?:\d{1,12}, ?){0,8}\d{0,12})\), \}[ ]*\n"
)
_CENTRAL_ENTRY = b"PK\x01\x02"
_LOCAL_HEADER = struct.Struct("<26xHH")

_STORAGES = {
    "torch BoolStorage": "bool",
    "torch ByteStorage": "uint8",
    "torch CharStorage": "int8",
    "torch ShortStorage": "int16",
    "torch IntStorage": "int32",
    "torch LongStorage": "int64",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch FloatStorage": "float32",
    "torch DoubleStorage": "float64",
}

#: The bits of the exponent: all are set in NaN and infinities (IEEE 754).
_EXPONENTS = {
    "float16": ("<u2", 0x7C00),
    "bfloat16": ("<u2", 0x7F80),
    "float32": ("<u4", 0x7F80_0000),
    "float64": ("<u8", 0x7FF0_0000_0000_0000),
}
#: Numbers that are looked at in one step, within the processor's cache.
_NUMBERS_AT_ONCE = 1 << 16

#: Exceptions that malformed bytes cause in the readers below.
_MALFORMED = (
    zipfile.BadZipFile,
    struct.error,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    TypeError,
    ValueError,
)

_NOT_SAVED = "the embeddings are not one dense tensor as torch.save writes it"


def read_embeds(fields: Mapping[str, Bytes | msgspec.Raw], param: str, max_bytes: int) -> bytes:
    """Return the document of one item; a field is base64 of a tensor, or (`msgspec.Raw`) a JSON array of numbers.

    `max_bytes` limits the sum of all base64. Raises InvalidEmbeds, InvalidBase64, MediaTooLarge, EmptyMedia, each
    naming the field.
    """
    if not 0 < len(fields) <= MAX_FIELDS:
        raise InvalidEmbeds(f"embeddings have between 1 and {MAX_FIELDS} fields", param=param)
    tensors: dict[str, EmbedsTensor] = {}
    for name, value in fields.items():
        try:
            tensors[name] = _read_field(value, max_bytes)
        except MedialaneError as error:
            raise error.at(param if name == UNNAMED else f"{param}.{name[:64]}") from error
        max_bytes -= 0 if isinstance(value, msgspec.Raw) else len(value)
    return encode_embeds(Embeds(tensors))


def _read_field(value: Bytes | msgspec.Raw, max_bytes: int) -> EmbedsTensor:
    return _read_numbers(value) if isinstance(value, msgspec.Raw) else read_tensor(decode_base64(value, max_bytes))


def _read_numbers(value: msgspec.Raw) -> EmbedsTensor:
    """Convert an array like vLLM: to int64, or float64 if it contains a float."""
    try:
        numbers = _decode_numbers(value)
        dtype = "float64" if any(isinstance(n, float) for n in numbers) else "int64"
        data = np.array(numbers, dtype).tobytes()
    except (msgspec.DecodeError, OverflowError) as error:
        raise InvalidEmbeds("a field of embeddings must be base64 or an array of numbers") from error
    if not 0 < len(numbers) <= MAX_NUMBERS:
        raise InvalidEmbeds(f"an array of numbers has between 1 and {MAX_NUMBERS}")
    return EmbedsTensor(TensorSpec(dtype, (len(numbers),)), data)  # type: ignore[arg-type]  # one of two literals


def read_tensor(data: bytes) -> EmbedsTensor:
    """Return the tensor in a saved file's bytes. Raises InvalidEmbeds."""
    try:
        tensor = _read_npy(data) if data.startswith(_NPY_MAGIC) else _read_torch(data)
    except _MALFORMED as error:
        raise InvalidEmbeds(_NOT_SAVED) from error
    if not tensor.spec.nbytes:
        raise InvalidEmbeds("the embeddings are empty")
    if not _is_finite(tensor):
        raise InvalidEmbeds("the embeddings have NaN or infinite numbers")
    return tensor


def _is_finite(tensor: EmbedsTensor) -> bool:
    if tensor.spec.dtype not in _EXPONENTS:
        return True
    unsigned, exponent = _EXPONENTS[tensor.spec.dtype]
    bits = np.frombuffer(tensor.data, unsigned)
    starts = range(0, len(bits), _NUMBERS_AT_ONCE)
    return not any(((bits[i : i + _NUMBERS_AT_ONCE] & exponent) == exponent).any() for i in starts)


class _Layout(NamedTuple):
    """The layout of a tensor in its storage, in elements."""

    record: str
    dtype: str
    num_stored: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _read_torch(data: bytes) -> EmbedsTensor:
    records = _records(data)
    (root,) = (name.removesuffix("data.pkl") for name in records if name.count("/") == 1 and name.endswith("/data.pkl"))
    order = records.get(f"{root}byteorder")
    if order is not None and bytes(order) != b"little":
        raise InvalidEmbeds("the embeddings are not little-endian")
    layout = _layout(bytes(records[f"{root}data.pkl"]))
    return _gather(layout, records[f"{root}data/{layout.record}"])


def _records(data: bytes) -> dict[str, memoryview]:
    """Return views of the archive's records. Counts directory entries first: the directory's length is untrusted."""
    if data.count(_CENTRAL_ENTRY) > MAX_RECORDS:
        raise InvalidEmbeds(_NOT_SAVED)
    with zipfile.ZipFile(BytesIO(data)) as archive:
        return {info.filename: _record(memoryview(data), info) for info in archive.infolist()}


def _record(data: memoryview, info: zipfile.ZipInfo) -> memoryview:
    name_length, extra_length = _LOCAL_HEADER.unpack_from(data, info.header_offset)
    start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    content = data[start : start + info.file_size]
    if info.compress_type != zipfile.ZIP_STORED or content.nbytes != info.file_size:
        raise InvalidEmbeds(_NOT_SAVED)
    return content


def _gather(layout: _Layout, storage: memoryview) -> EmbedsTensor:
    """Return the tensor's elements in C order."""
    size = ITEM_BYTES[layout.dtype]
    _check(layout, storage.nbytes // size)
    elements = np.frombuffer(storage, f"V{size}")[layout.offset :]
    strides = [stride * size for stride in layout.strides]
    tensor = np.lib.stride_tricks.as_strided(elements, layout.shape, strides, writeable=False)
    return _tensor(layout.dtype, layout.shape, tensor.tobytes())


def _check(layout: _Layout, num_stored: int) -> None:
    """Raise InvalidEmbeds for a tensor that reaches beyond its storage, or has more elements."""
    shape, strides = layout.shape, layout.strides
    if len(shape) > MAX_DIMS or len(shape) != len(strides) or min((0, layout.offset, *shape, *strides)) < 0:
        raise InvalidEmbeds(_NOT_SAVED)
    num_elements = prod(shape)
    last = layout.offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if layout.num_stored != num_stored or num_elements > num_stored or (num_elements and last >= num_stored):
        raise InvalidEmbeds("the embeddings are larger than what was sent")


def _read_npy(data: bytes) -> EmbedsTensor:
    """Read the format of `numpy.save`, by regular expression: numpy's own reader evaluates the header as a literal."""
    major, length = data[6], struct.unpack_from("<H", data, 8)[0]
    end = _NPY_HEADER_AT + length
    header = _NPY_HEADER.fullmatch(data, _NPY_HEADER_AT, end) if major == 1 else None
    if header is None:
        raise InvalidEmbeds("the embeddings are not one array as numpy.save writes it")
    dtype = np.dtype(header[1].decode())
    shape = tuple(int(n) for n in header[3].split(b",") if n.strip())
    if dtype.name not in _STORAGES.values() or len(shape) > MAX_DIMS:
        raise InvalidEmbeds(_NOT_SAVED)
    if len(data) - end != prod(shape) * dtype.itemsize:
        raise InvalidEmbeds("the embeddings are larger than what was sent")
    array = np.frombuffer(data, dtype, offset=end).reshape(shape, order="F" if header[2] == b"True" else "C")
    return _tensor(dtype.name, shape, array.tobytes())


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> EmbedsTensor:
    return EmbedsTensor(TensorSpec(dtype, shape), data)  # type: ignore[arg-type]  # a value from tables of `Dtype`


def _layout(data: bytes) -> _Layout:
    """Return the layout that a tensor's pickle describes. Raises InvalidEmbeds, or one of `_MALFORMED`."""
    if len(data) > MAX_PICKLE_BYTES:
        raise InvalidEmbeds(_NOT_SAVED)
    value = _read_pickle(data)
    match value:
        case ("torch._utils _rebuild_parameter", (tensor, bool(), ("collections OrderedDict", ()))):
            value = tensor
    match value:
        case (
            "torch._utils _rebuild_tensor_v2",
            (
                ("storage", str(storage), str(key), str(), num_stored),
                offset,
                tuple(shape),
                tuple(strides),
                bool(),
                ("collections OrderedDict", ()),  # hooks
            ),
        ) if all(type(n) is int for n in (num_stored, offset, *shape, *strides)):
            return _Layout(key, _STORAGES[storage], num_stored, offset, shape, strides)
    raise InvalidEmbeds(_NOT_SAVED)


def _read_pickle(data: bytes) -> Any:
    """Return the object that a pickle describes: numbers, strings and tuples. A global is its name, a call the tuple of
    function and arguments, a persistent id itself."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STOP":
            break
        _STEPS[opcode.name](stack, memo, argument)
    (value,) = stack
    return value


_MARK = object()


def _make_tuple(stack: list[Any], length: int) -> None:
    first = len(stack) - length
    stack[first:] = [tuple(stack[first:])]


def _make_tuple_from_mark(stack: list[Any], _memo: dict[int, Any], _: Any) -> None:
    first = len(stack) - 1 - stack[::-1].index(_MARK)
    stack[first:] = [tuple(stack[first + 1 :])]


_STEPS: dict[str, Callable[[list[Any], dict[int, Any], Any], None]] = {
    **dict.fromkeys(("PROTO", "BINPERSID"), lambda stack, memo, _: None),
    **dict.fromkeys(
        ("GLOBAL", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"),
        lambda stack, memo, value: stack.append(value),
    ),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda stack, memo, number: memo.update({number: stack[-1]})),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda stack, memo, number: stack.append(memo[number])),
    "NEWTRUE": lambda stack, memo, _: stack.append(True),
    "NEWFALSE": lambda stack, memo, _: stack.append(False),
    "MARK": lambda stack, memo, _: stack.append(_MARK),
    "TUPLE": _make_tuple_from_mark,
    "EMPTY_TUPLE": lambda stack, memo, _: stack.append(()),
    "TUPLE1": lambda stack, memo, _: _make_tuple(stack, 1),
    "TUPLE2": lambda stack, memo, _: _make_tuple(stack, 2),
    "TUPLE3": lambda stack, memo, _: _make_tuple(stack, 3),
    "REDUCE": lambda stack, memo, _: _make_tuple(stack, 2),
}
