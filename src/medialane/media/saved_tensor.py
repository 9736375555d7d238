"""Reads a single tensor written by `torch.save` or `numpy.save`, without unpickling.

Theory of operation. `torch.save` writes a zip archive of stored (uncompressed) records: `data.pkl`, a pickle of about
150 bytes that describes the tensor's layout in its storage, and `data/0`, the storage. Even
`torch.load(weights_only=True)` is unsafe for untrusted bytes: it calls functions named by the pickle (among them
`bytearray` of any length), inflates compressed records, and makes tensors of any shape over one element. This
interpreter supports only some twenty pickle opcodes, which push numbers, strings and tuples on a stack, and only the
calls that describe a tensor. Nothing is imported, hashed or called. All lengths are checked against the bytes received.

torch's old format (before 1.6), sparse tensors, subclasses and expanded views are rejected.
"""

from __future__ import annotations

import pickletools
import re
import struct
import zipfile
from collections.abc import Callable
from io import BytesIO
from math import prod
from typing import Any, NamedTuple

import numpy as np

from medialane.core.embeds import EmbedsTensor
from medialane.core.errors import InvalidEmbeds
from medialane.core.tensor import ITEM_BYTES, TensorSpec

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
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
}

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


def read_tensor(data: bytes) -> EmbedsTensor:
    """Return the tensor in a saved file's bytes. Raises InvalidEmbeds."""
    try:
        found = _read_npy(data) if data.startswith(_NPY_MAGIC) else _read_torch(data)
    except _MALFORMED as error:
        raise InvalidEmbeds(_NOT_SAVED) from error
    if not found.spec.nbytes:
        raise InvalidEmbeds("the embeddings are empty")
    return found


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
    found = data[start : start + info.file_size]
    if info.compress_type != zipfile.ZIP_STORED or found.nbytes != info.file_size:
        raise InvalidEmbeds(_NOT_SAVED)
    return found


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
    if dtype.name not in ITEM_BYTES or len(shape) > MAX_DIMS:
        raise InvalidEmbeds(_NOT_SAVED)
    if len(data) - end != prod(shape) * dtype.itemsize:
        raise InvalidEmbeds("the embeddings are larger than what was sent")
    array = np.frombuffer(data, dtype, offset=end).reshape(shape, order="F" if header[2] == b"True" else "C")
    return _tensor(dtype.name, shape, array.tobytes())


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> EmbedsTensor:
    return EmbedsTensor(TensorSpec(dtype, shape), data)  # type: ignore[arg-type]  # a value from tables of `Dtype`


class _Global(NamedTuple):
    """A name that unpickling would import; here it is never resolved."""

    name: str


class _Mark:
    """Marks the start of a tuple on the stack."""


class _Hooks:
    """torch's empty OrderedDict of hooks."""


def _layout(data: bytes) -> _Layout:
    """Return the layout that a tensor's pickle describes. Raises InvalidEmbeds, or one of `_MALFORMED`."""
    if len(data) > MAX_PICKLE_BYTES:
        raise InvalidEmbeds(_NOT_SAVED)
    stack = _Stack()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STOP":
            break
        _STEPS[opcode.name](stack, argument)
    (found,) = stack.values
    if not isinstance(found, _Layout):
        raise InvalidEmbeds(_NOT_SAVED)
    return found


class _Stack:
    """A pickle's stack and memo. Values are int, bool, str, tuples of values, and the four types above."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.values.append(value)

    def store(self, number: int) -> None:
        self._memo[number] = self.values[-1]

    def load(self, number: int) -> None:
        self.values.append(self._memo[number])

    def tuple_of(self, length: int) -> None:
        first = len(self.values) - length
        self.values[first:] = [tuple(self.values[first:])]

    def tuple_from_mark(self) -> None:
        first = len(self.values) - 1
        while not isinstance(self.values[first], _Mark):  # IndexError if there is none
            first -= 1
        self.values[first:] = [tuple(self.values[first + 1 :])]

    def storage(self) -> None:
        """Replace torch's persistent id of a storage, `("storage", type, key, device, length)`."""
        kind, of, key, _device, length = self.values.pop()
        module, _, name = of.name.partition(" ")
        if (kind, module) != ("storage", "torch") or type(key) is not str or type(length) is not int:
            raise InvalidEmbeds(_NOT_SAVED)
        self.values.append((key, _STORAGES[name], length))

    def call(self) -> None:
        arguments, function = self.values.pop(), self.values.pop()
        self.values.append(_CALLS[function.name](*arguments))


def _rebuild_tensor(
    storage: tuple[str, str, int],
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    _requires_grad: bool,
    _hooks: _Hooks,
    _metadata: object = None,
) -> _Layout:
    if not all(type(n) is int for n in (offset, *shape, *strides)):
        raise InvalidEmbeds(_NOT_SAVED)
    return _Layout(*storage, offset, shape, strides)


def _rebuild_parameter(tensor: _Layout, _requires_grad: bool, _hooks: _Hooks) -> _Layout:
    return tensor


_CALLS: dict[str, Callable[..., _Layout | _Hooks]] = {
    "torch._utils _rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils _rebuild_parameter": _rebuild_parameter,
    "collections OrderedDict": _Hooks,
}

_STEPS: dict[str, Callable[[_Stack, Any], None]] = {
    "PROTO": lambda stack, version: None,
    "GLOBAL": lambda stack, name: stack.push(_Global(name)),
    "MARK": lambda stack, _: stack.push(_Mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Stack.store),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Stack.load),
    **dict.fromkeys(("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"), _Stack.push),
    "NEWTRUE": lambda stack, _: stack.push(True),
    "NEWFALSE": lambda stack, _: stack.push(False),
    "EMPTY_TUPLE": lambda stack, _: stack.push(()),
    "TUPLE": lambda stack, _: stack.tuple_from_mark(),
    "TUPLE1": lambda stack, _: stack.tuple_of(1),
    "TUPLE2": lambda stack, _: stack.tuple_of(2),
    "TUPLE3": lambda stack, _: stack.tuple_of(3),
    "BINPERSID": lambda stack, _: stack.storage(),
    "REDUCE": lambda stack, _: stack.call(),
}
