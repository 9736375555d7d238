"""The processor settings of a feature, which must be equal in store, gateway and worker for features to be compatible.

They include everything that changes the values of a processed item, by value or by digest, but not paths and build tags
of libraries: the same model may have another path on another host, and a gateway with a CPU build of torch serves a
worker with a CUDA build.

Describes a Python object by its type and content, equally in every process, so that processes can compare theirs.

Theory of operation. Neither `repr` nor JSON with a fallback to `str` is stable: they contain memory addresses, and the
order of sets, which differs by PYTHONHASHSEED. Here each value becomes a tree that JSON represents: plain values as
they are, others as an object that names their type: enums, dtypes, arrays (by the hash of their bytes), functions (by
qualified name), and any other object by class and attributes. What has no attributes (locks, sockets) is described by
its class alone, and its path is reported.

Paths of the model and of the hub's cache differ between hosts, so they are left out, as are tokenizers and the model's
configuration, whose files are compared as part of the model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from enum import Enum
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import transformers
import vllm
from huggingface_hub import constants
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from vllm.config import ModelConfig

from medialane.types.hashing import canonical_options, content_hash, digest
from medialane.vllm_bridge.learned.model_profile import ModelProfile
from medialane.vllm_bridge.seams.multimodal import NO_HF_PROCESSOR, load_hf_processor

#: Files of a model from which its processor or tokenizer is built.
_FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "tekken.json",
    "params.json",
)

logger = logging.getLogger(__name__)


def processor_settings(model_config: ModelConfig, profile: ModelProfile | None) -> dict[str, str]:
    """Return the settings with which this process computes features; `profile` is None for a text-only model. Reads
    the model's small files; call it once."""
    return {
        "model": _model(model_config),
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "vllm": _release(vllm.__version__),
        "transformers": _release(transformers.__version__),
        "torch": _release(torch.__version__),
        "torchvision": _release(version("torchvision")),
        **(_media_settings(model_config, profile) if profile is not None else {}),
    }


def _model(model_config: ModelConfig) -> str:
    folder = Path(model_config.model)
    if not folder.is_dir():
        return f"{model_config.model}@{model_config.revision or 'main'}"
    hashes = {name: content_hash((folder / name).read_bytes()) for name in _FILES if (folder / name).is_file()}
    return f"files {digest(hashes)[:16]}"


def _media_settings(model_config: ModelConfig, profile: ModelProfile) -> dict[str, str]:
    config = model_config.multimodal_config
    return {
        "processor": type(profile.processor).__qualname__,
        "device_normalize": str(bool(config.mm_device_do_normalize)),
        "processor_kwargs": canonical_options(config.mm_processor_kwargs or {}).decode(),
        "no_features": " ".join(profile.unfit),
        **compared_settings(lambda: load_hf_processor(profile.processor), _folders(model_config)),
    }


def compared_settings(load: Callable[[], Any], folders: Sequence[str] = ()) -> dict[str, str]:
    """Return the effective settings (sizes, means, flags) of the Hugging Face processor that `load` makes, from
    whatever file or default. Paths in `folders` are described relatively to them.

    Two new ones are compared: neither has been changed by use, and what differs between them is not a setting. A model
    without one has no such settings.
    """
    try:
        one, two = (_described(load(), folders) for _ in range(2))
    except NO_HF_PROCESSOR as error:
        logger.warning("the model has no Hugging Face processor whose settings could be compared: %r", error)
        return {}
    changing = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    if changing:
        names = ", ".join(changing)
        logger.warning("not compared, because each time the model's processor is loaded they differ: %s", names)
    compared = {name: description for name, description in one.items() if name not in changing}
    unknown = sorted({f"{name}{path}" for name, description in compared.items() for path in description.unknown})
    if unknown:
        logger.warning("settings of the model's processor of which only the type is compared: %s", ", ".join(unknown))
    return {name: description.text for name, description in compared.items()}


def _described(hf_processor: Any, folders: Sequence[str]) -> dict[str, Description]:
    """Describe a processor and its components (image processor, feature extractor) by their attributes, so that one
    that differs can be named."""
    described = {"hf_processor": describe(type(hf_processor))}
    for attribute, part in (attributes(hf_processor) or {}).items():
        if attribute.endswith("tokenizer"):  # compared as files of the model
            continue
        name = f"hf_processor.{attribute}"
        members = attributes(part) if is_component(part) else None
        described[name] = describe(part if members is None else type(part), folders=folders)
        for member, value in (members or {}).items():
            described[f"{name}.{member}"] = describe(value, folders=folders)
    return described


def _folders(model_config: ModelConfig) -> list[str]:
    named = (model_config.model, model_config.tokenizer, model_config.hf_config_path)
    return [*[str(path) for path in named if path and Path(path).is_absolute()], constants.HF_HUB_CACHE]


def _release(full: str) -> str:
    """2.13.0+cpu -> 2.13.0"""
    return full.partition("+")[0]


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
    return hasattr(value, "__dict__") and not any(isinstance(value, kinds) for kinds, _ in _KINDS)


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
        is_large = isinstance(value, Sized) and not isinstance(value, _WHOLE) and len(value) > MAX_ELEMENTS
        for kinds, of in () if is_large else _KINDS:
            if isinstance(value, kinds):
                return of(self, value, path)
        members = None if is_large else attributes(value)
        if members is None:
            self.unknown.append(f"{path} ({type(value).__module__}.{type(value).__qualname__})")
            return {"unknown": type(value).__qualname__}
        inner = {name: self.tree(member, f"{path}.{name}") for name, member in sorted(members.items())}
        return {type(value).__qualname__: inner}

    def mapping(self, value: Mapping[Any, object], path: str) -> Tree:
        """Without the order of keys, which may come from a set."""
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

    def array(self, value: np.ndarray | np.generic, path: str) -> Tree:
        if value.dtype.hasobject:
            return {"array": self.tree(value.tolist(), path)}
        is_table = value.dtype.kind in "fc" and value.size > MAX_FLOATS
        content = [] if is_table else [content_hash(np.ascontiguousarray(value).tobytes())]
        return {"array": [str(value.dtype), list(value.shape), *content]}

    def tensor(self, value: torch.Tensor, _path: str) -> Tree:
        is_table = (value.is_floating_point() or value.is_complex()) and value.numel() > MAX_FLOATS
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        content = [] if is_table else [content_hash(data.numpy().tobytes())]
        return {"tensor": [str(value.dtype), list(value.shape), *content]}


#: Checked in this order; all others are described by their attributes.
_KINDS: tuple[tuple[Any, Callable[[_Describer, Any, str], Tree]], ...] = (
    (Enum, lambda _, value, __: {type(value).__qualname__: value.name or repr(value.value)}),
    (type, lambda _, value, __: {"class": value.__qualname__}),
    (ModuleType, lambda _, value, __: {"module": value.__name__}),
    (logging.Logger, lambda _, value, __: {"logger": value.name}),
    (PreTrainedTokenizerBase | PreTrainedConfig, lambda _, value, __: {"files of": type(value).__qualname__}),
    (bytes | bytearray | memoryview, lambda _, value, __: {"bytes": content_hash(bytes(value))}),
    (PurePath, lambda self, value, path: {"path": self.tree(str(value), path)}),
    (torch.dtype | torch.device | torch.layout | np.dtype, lambda _, value, __: {type(value).__qualname__: str(value)}),
    (np.ndarray | np.generic, _Describer.array),
    (torch.Tensor, _Describer.tensor),
    (partial, lambda self, value, path: {"partial": self.tree([value.func, value.args, value.keywords], path)}),
    (FunctionType | MethodType | BuiltinFunctionType, lambda _, value, __: {"function": value.__qualname__}),
    (Mapping, _Describer.mapping),
    (set | frozenset, _Describer.unordered),
    (list | tuple, _Describer.sequence),
)
