"""Describes a Python object by its type and content, equally in every process, so that processes can compare theirs.

Theory of operation. Neither `repr` nor JSON with a fallback to `str` is stable: they contain memory addresses, and the
order of sets, which differs by PYTHONHASHSEED. Here each value becomes a tree that JSON represents: plain values as
they are, others as an object that names their type: enums, dtypes, arrays (by the hash of their bytes), functions (by
qualified name and what they enclose), and any other object by class and attributes, or by what pickle would save.
What has none of these (locks, modules, sockets) is described by its class alone, and its path is reported.

Paths of the model and of the hub's cache differ between hosts, so they are left out, as are tokenizers and the model's
configuration, whose files are compared as part of the model.
"""

from __future__ import annotations

import copyreg
import re
from collections.abc import Callable, Iterable, Mapping, Sized
from enum import Enum
from functools import cached_property, partial
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from medialane.types.hashing import content_hash

#: A value whose JSON is longer is described by the hash of it.
MAX_TEXT = 100

#: Attributes that do not affect results: where an object was loaded from, and the text of a prompt.
_IGNORED = frozenset(("_name_or_path", "name_or_path", "chat_template"))

#: A larger collection is a vocabulary, or a cache.
MAX_ELEMENTS = 20_000

#: Larger arrays of floats are tables (mel filters, windows), which a processor computes from its other settings. Their
#: last bits differ between CPUs, so only their shapes are compared.
MAX_FLOATS = 256

#: Described by their content whatever their size; one number in an array or a tensor has no length.
_WHOLE = (bytes, np.ndarray, torch.Tensor)

_MAX_DEPTH = 32
#: Numbers up to this are exact in JSON.
MAX_NUMBER = 1 << 53
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")

#: A value that JSON represents.
Tree = Any


class Description(NamedTuple):
    """`text` is equal for equal objects; `unknown` are the paths in the object, with their types, of what is described
    by its class alone."""

    text: str
    unknown: tuple[str, ...]


def describe(value: object, *, folders: Iterable[str] = ()) -> Description:
    """Describe `value`. Paths in one of `folders` are described relatively to it."""
    describer = _Describer(folders)
    encoded = msgspec.json.encode(describer.tree(value, ""), order="deterministic")
    text = encoded.decode() if len(encoded) <= MAX_TEXT else f"{type(value).__qualname__} {content_hash(encoded)[:16]}"
    return Description(text, tuple(describer.unknown))


def attributes(value: object) -> dict[str, object] | None:
    """Return the attributes that distinguish an object from others of its class; None if Python does not know them."""
    mro = type(value).__mro__
    slots = [name for cls in mro for name in _names(vars(cls).get("__slots__", ())) if hasattr(value, name)]
    if not slots and not hasattr(value, "__dict__"):
        return None
    cached = {name for cls in mro for name, member in vars(cls).items() if isinstance(member, cached_property)}
    members = {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}
    return {name: inner for name, inner in members.items() if name not in cached | _IGNORED}


def is_component(value: object) -> bool:
    """Return whether `value` is an object of a library of processors, rather than a value."""
    plain = any(isinstance(value, kinds) for kinds, _ in _KINDS)
    return not plain and not _has_own_reduction(type(value)) and hasattr(value, "__dict__")


def _names(slots: str | Iterable[str]) -> list[str]:
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if not name.startswith("__")]


class _Describer:
    """One description. `unknown` grows as `tree` is called."""

    def __init__(self, folders: Iterable[str]) -> None:
        self.unknown: list[str] = []
        self._folders = sorted(filter(None, folders), key=len, reverse=True)
        self._open: list[object] = []

    def tree(self, value: object, path: str) -> Tree:
        """Describe a value that is at `path` in the object."""
        if value is None or (isinstance(value, bool | str | int | float) and not isinstance(value, Enum)):
            return self._plain(value)
        if any(value is outer for outer in self._open) or len(self._open) > _MAX_DEPTH:
            return {"within": type(value).__qualname__}
        self._open.append(value)
        try:
            return self._compound(value, path)
        finally:
            self._open.pop()

    def _plain(self, value: bool | float | str | None) -> Tree:
        kind = type(value)
        if isinstance(value, str):
            text = self._relative(_ADDRESS.sub("0x", value))
            return text if kind is str else {kind.__qualname__: text}
        is_json = value is None or abs(value) <= MAX_NUMBER
        return value if is_json and kind in (bool, int, float, type(None)) else {kind.__qualname__: repr(value)}

    def _relative(self, text: str) -> str:
        for folder in self._folders:
            if text == folder or text.startswith(f"{folder}/"):
                return f"...{text[len(folder) :]}"
        return text

    def _compound(self, value: object, path: str) -> Tree:
        if not isinstance(value, _WHOLE) and isinstance(value, Sized) and len(value) > MAX_ELEMENTS:
            return self._by_class(value, path)
        for kinds, of in _KINDS:
            if isinstance(value, kinds):
                return of(self, value, path)
        inner = None if _has_own_reduction(type(value)) else attributes(value)
        return self._reduced(value, path) if inner is None else self._members(value, inner, path)

    def _members(self, value: object, values: Mapping[str, object], path: str) -> Tree:
        members = {name: self.tree(inner, f"{path}.{name}") for name, inner in sorted(values.items())}
        return {type(value).__qualname__: members}

    def mapping(self, value: Mapping[Any, object], path: str) -> Tree:
        """Without the order of keys, which may be that of a set."""
        pairs = [[self.tree(key, path), self.tree(inner, f"{path}[{key}]")] for key, inner in value.items()]
        return {type(value).__qualname__: sorted(pairs, key=msgspec.json.encode)}

    def sequence(self, value: Iterable[object], path: str) -> Tree:
        """Names are sorted: a list of them may have been made from a set, and no processor depends on their order."""
        inner = [self.tree(one, f"{path}[{number}]") for number, one in enumerate(value)]
        if inner and all(isinstance(one, str) for one in inner):
            inner.sort()
        return inner if type(value) is list else {type(value).__qualname__: inner}

    def unordered(self, value: Iterable[object], path: str) -> Tree:
        return {type(value).__qualname__: sorted((self.tree(one, path) for one in value), key=msgspec.json.encode)}

    def function(self, value: FunctionType, path: str) -> Tree:
        enclosed = [_enclosed(cell) for cell in value.__closure__ or ()]
        inner = [*enclosed, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        return {"function": value.__qualname__, "with": [self.tree(one, f"{path}()") for one in inner]}

    def method(self, value: MethodType, path: str) -> Tree:
        return {"method": value.__func__.__qualname__, "of": self.tree(value.__self__, path)}

    def partial(self, value: partial[Any], path: str) -> Tree:
        return {"partial": [self.tree(one, path) for one in (value.func, value.args, value.keywords)]}

    def array(self, value: np.ndarray | np.generic, path: str) -> Tree:
        if value.dtype.hasobject:
            return {"array": self.tree(value.tolist(), path)}
        kind = [str(value.dtype), list(value.shape)]
        if value.dtype.kind in "fc" and value.size > MAX_FLOATS:
            return {"array": kind}
        return {"array": [*kind, content_hash(np.ascontiguousarray(value).tobytes())]}

    def tensor(self, value: torch.Tensor, _path: str) -> Tree:
        kind = [str(value.dtype), list(value.shape)]
        is_table = value.is_floating_point() or value.is_complex()
        if value.is_meta or value.layout is not torch.strided or (is_table and value.numel() > MAX_FLOATS):
            return {"tensor": kind}
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return {"tensor": [*kind, content_hash(data.numpy().tobytes())]}

    def _reduced(self, value: object, path: str) -> Tree:
        """Describe by what pickle would save, without its memo."""
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            saved: Any = value.__reduce_ex__(2) if reduce is None else reduce(value)
        except (TypeError, ValueError, AttributeError, RuntimeError):  # it cannot be pickled
            inner = attributes(value)
            return self._by_class(value, path) if inner is None else self._members(value, inner, path)
        if isinstance(saved, str):
            return {type(value).__qualname__: saved}
        parts = [list(part) if n > 2 and part is not None else part for n, part in enumerate(saved)]
        return {type(value).__qualname__: [self.tree(part, path) for part in parts[1:5]]}

    def _by_class(self, value: object, path: str) -> Tree:
        self.unknown.append(f"{path.removeprefix('.')} ({type(value).__module__}.{type(value).__qualname__})")
        return {"unknown": type(value).__qualname__}


def _enclosed(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _has_own_reduction(cls: type) -> bool:
    """Return whether a class says what of it pickle saves: a logger its name, not the tree of loggers."""
    names = ("__reduce__", "__reduce_ex__")
    return cls in copyreg.dispatch_table or any(getattr(cls, name) is not getattr(object, name) for name in names)


def _of_class(_: _Describer, value: Any, __: str) -> Tree:
    return {"class": value.__qualname__}


#: Checked in this order; all others are described by their attributes.
_KINDS: tuple[tuple[Any, Callable[[_Describer, Any, str], Tree]], ...] = (
    (Enum, lambda _, value, __: {type(value).__qualname__: value.name or repr(value.value)}),
    (type, _of_class),
    (ModuleType, lambda _, value, __: {"module": value.__name__}),
    (PreTrainedTokenizerBase | PreTrainedConfig, lambda _, value, __: {"files of": type(value).__qualname__}),
    (bytes | bytearray | memoryview, lambda _, value, __: {"bytes": content_hash(bytes(value))}),
    (PurePath, lambda self, value, path: {"path": self.tree(str(value), path)}),
    (torch.dtype | torch.device | torch.layout | np.dtype, lambda _, value, __: {type(value).__qualname__: str(value)}),
    (np.ndarray | np.generic, _Describer.array),
    (torch.Tensor, _Describer.tensor),
    (partial, _Describer.partial),
    (MethodType, _Describer.method),
    (FunctionType, _Describer.function),
    (BuiltinFunctionType, lambda _, value, __: {"function": value.__qualname__}),
    (Mapping, _Describer.mapping),
    (set | frozenset, _Describer.unordered),
    (list | tuple, _Describer.sequence),
)
