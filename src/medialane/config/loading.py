"""Loads the values of settings from flags, environment and a TOML file, and parses them.

A flag takes precedence over the environment, the environment over the file, the file over the default. An unknown name
is an error in each of the three.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from medialane.config.settings import PREFIX, Config, SectionName, Setting, settings
from medialane.core.errors import StartupFailed
from medialane.core.process.phase import VARIABLE as PHASE_FILE
from medialane.observability.logging import VARIABLE as LOG_PROCESS

#: Names the file of settings in the environment.
FILE: Final = PREFIX + "CONFIG"


class _RawValue(NamedTuple):
    value: Any
    source: str


def load_config(
    flags: Mapping[str, Any] | None = None,
    *,
    file: str | None = None,
    environ: Mapping[str, str] | None = None,
    sections: Iterable[SectionName] = (),
) -> Config:
    """Build the configuration and validate `sections`.

    `flags` are raw values by setting name; `environ` defaults to the process's environment. Raises StartupFailed naming
    the setting and the source of its value.
    """
    environ = os.environ if environ is None else environ
    known = {setting.name: setting for setting in settings()}
    from_file = _from_file(file or environ.get(FILE), known)
    from_flags = {name: _RawValue(value, "--" + name) for name, value in (flags or {}).items()}
    for name, (_, source) in (from_file | from_flags).items():
        if name in known and known[name].is_secret:
            other = f", or {known[name].flag}-file" if f"{name}-file" in known else ""
            raise StartupFailed(f"{source} is not accepted here: set {known[name].variable} in the environment{other}")
    given = from_file | _from_environ(environ, known) | from_flags
    config = _build(given, known)
    config.validate(sections)
    return config


def _from_file(path: str | None, known: Mapping[str, Setting]) -> dict[str, _RawValue]:
    if not path:
        return {}
    try:
        table = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise StartupFailed(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupFailed(f"the configuration file {path} is not TOML: {error}") from error
    for name in table:
        if name not in known:
            raise StartupFailed(f"{path}: unknown setting {name}{_suggestion(name, known)}")
    return {name: _RawValue(value, f"{path}: {name}") for name, value in table.items()}


def _from_environ(environ: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, _RawValue]:
    by_variable = {setting.variable: name for name, setting in known.items()}
    given = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in (FILE, PHASE_FILE, LOG_PROCESS):
            continue
        if variable not in by_variable:
            raise StartupFailed(f"unknown environment variable {variable}{_suggestion(variable, by_variable)}")
        given[by_variable[variable]] = _RawValue(value, variable)
    return given


def _suggestion(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _build(given: Mapping[str, _RawValue], known: Mapping[str, Setting]) -> Config:
    fields: dict[str, dict[str, Any]] = {}
    for name, (value, source) in given.items():
        if name not in known:
            raise StartupFailed(f"unknown setting {source}{_suggestion(name, known)}")
        setting = known[name]
        fields.setdefault(setting.section, {})[setting.field] = _convert(setting, value, source)
    sections = {
        section.name: section.type(**fields.get(section.name, {})) for section in msgspec.structs.fields(Config)
    }
    return Config(**sections)


def _convert(setting: Setting, value: Any, source: str) -> Any:
    try:
        if setting.unit == "bytes" and isinstance(value, str):
            value = parse_size(value)
        elif _is_list(setting.type) and isinstance(value, str):
            value = json.loads(value) if value.startswith("[") else [v.strip() for v in value.split(",") if v.strip()]
        return msgspec.convert(value, setting.type, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        shown = "" if setting.is_secret else f" {value!r}"
        raise StartupFailed(f"{source}{shown}: {_readable(str(error), setting)}") from error


def _is_list(kind: Any) -> bool:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(map(_is_list, typing.get_args(kind)))
    return typing.get_origin(kind) in (tuple, list, frozenset)


def _readable(message: str, setting: Setting) -> str:
    if setting.type == int | Literal["auto"]:
        return "must be a whole number or auto"
    if typing.get_origin(setting.type) is Literal:
        return "must be one of " + ", ".join(map(str, typing.get_args(setting.type)))
    if setting.type in (int, float, bool) and setting.unit != "bytes":
        expected = {
            int: "a whole number",
            float: "a number of seconds" if setting.unit else "a number",
            bool: "true or false",
        }
        return f"must be {expected[setting.type]}"
    return message


_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse a size: `2GiB`, `2g` and `2147483648` are equal; `2GB` is 2 * 10**9. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("must be a size such as 2GiB, 512MiB or a number of bytes")
    number, letter, binary = match.groups()
    decimal = not binary and letter and text.strip()[-1] in "bB"
    return int(float(number) * (1000 if decimal else 1024) ** " kmgt".index(letter.lower() or " "))
