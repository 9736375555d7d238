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
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from medialane.config.settings import PREFIX, Config, SectionName, Setting, settings
from medialane.observability.logging import VARIABLE as LOG_PROCESS
from medialane.observability.logging import LoggingConfig
from medialane.runtime.heartbeat import VARIABLE as HEARTBEAT
from medialane.runtime.phase import VARIABLE as PHASE_FILE
from medialane.types.errors import StartupFailed

#: Names the file of settings in the environment.
FILE: Final = PREFIX + "CONFIG"

#: The setting that changes while a process runs; all models have the same value.
LOG_LEVEL: Final = "log-level"

#: The tables of several models, in a file for `medialane serve`.
MODELS: Final = "models"


class _RawValue(NamedTuple):
    value: Any
    source: str


class TableRules(msgspec.Struct, frozen=True):
    """What a table of one model may have besides settings, and the settings that it may not have: they apply to all
    models."""

    own: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()


class ModelTable(NamedTuple):
    """A table of the file: the members that are no settings, and the configuration of this model's processes."""

    name: str
    own: Mapping[str, Any]
    config: Config


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
    sources = _Sources(flags or {}, file, os.environ if environ is None else environ)
    if sources.models:
        raise StartupFailed(f"{sources.path}: the table {MODELS} is for `medialane serve` without a MODEL")
    return sources.config(sections)


def load_models(
    flags: Mapping[str, Any] | None = None,
    *,
    file: str | None = None,
    environ: Mapping[str, str] | None = None,
    sections: Iterable[SectionName] = (),
    rules: TableRules,
) -> tuple[Config, list[ModelTable]]:
    """As `load_config`, of a file that may have tables of models, whose settings win over the settings at its top,
    which are validated as parts of the tables then."""
    sources = _Sources(flags or {}, file, os.environ if environ is None else environ)
    sections = tuple(sections)
    tables = [sources.table(name, table, sections=sections, rules=rules) for name, table in sources.models.items()]
    return sources.config(() if tables else sections), tables


def log_level_file(flags: Mapping[str, Any], file: str | None, environ: Mapping[str, str]) -> str:
    """Return the file whose level of the log counts; empty if there is none, or a flag or the environment wins."""
    is_given = LOG_LEVEL in flags or PREFIX + LOG_LEVEL.replace("-", "_").upper() in environ
    return "" if is_given else file or environ.get(FILE) or ""


def load_logging(file: str) -> LoggingConfig:
    """Return the settings of the log that are at the top of a file. Raises StartupFailed also for other settings there
    that cannot be read."""
    return _Sources({}, file, {}).config(("logging",)).logging


class _Sources:
    """The values of settings, by where they are given. Raises StartupFailed."""

    def __init__(self, flags: Mapping[str, Any], file: str | None, environ: Mapping[str, str]) -> None:
        self._known = {setting.name: setting for setting in settings()}
        self.path = file or environ.get(FILE) or ""
        table = _read_toml(self.path)
        self.models = _model_tables(table.pop(MODELS, {}), self.path)
        self._file = self._named(table, f"{self.path}: ")
        self._environ = _from_environ(environ, self._known)
        self._flags = {name: _RawValue(value, "--" + name) for name, value in flags.items()}
        self._refuse_secrets(self._flags)

    def config(self, sections: Iterable[SectionName], table: Mapping[str, _RawValue] | None = None) -> Config:
        config = _build({**self._file, **(table or {}), **self._environ, **self._flags}, self._known)
        config.validate(sections)
        return config

    def table(
        self,
        name: str,
        table: Mapping[str, Any],
        *,
        sections: Iterable[SectionName],
        rules: TableRules,
    ) -> ModelTable:
        where = f"{self.path}: {MODELS}.{name}"
        own = {key: value for key, value in table.items() if key in rules.own}
        values = self._named({key: value for key, value in table.items() if key not in own}, f"{where}.", rules.own)
        for key in values:
            if key in rules.shared:
                raise StartupFailed(f"{where}: {key} is the same for all models: it belongs at the top of the file")
        try:
            config = self.config(sections, values)
        except StartupFailed as error:
            raise StartupFailed(f"{where}: {error.message}") from error
        return ModelTable(name, own, config)

    def _named(self, table: Mapping[str, Any], where: str, own: Collection[str] = ()) -> dict[str, _RawValue]:
        for name in table:
            if name not in self._known:
                raise StartupFailed(f"{where}unknown setting {name}{_suggestion(name, [*self._known, *own])}")
        values = {name: _RawValue(value, f"{where}{name}") for name, value in table.items()}
        self._refuse_secrets(values)
        return values

    def _refuse_secrets(self, values: Mapping[str, _RawValue]) -> None:
        for name, (_, source) in values.items():
            setting = self._known.get(name)
            if setting is not None and setting.is_secret:
                other = f", or {setting.flag}-file" if f"{name}-file" in self._known else ""
                raise StartupFailed(f"{source} is not accepted here: set {setting.variable} in the environment{other}")


def _model_tables(tables: Any, path: str) -> Mapping[str, Mapping[str, Any]]:
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise StartupFailed(f"{path}: {MODELS} must have a table for each model: [{MODELS}.NAME]")
    return tables


def _read_toml(path: str) -> dict[str, Any]:
    if not path:
        return {}
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise StartupFailed(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupFailed(f"the configuration file {path} is not TOML: {error}") from error


def _from_environ(environ: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, _RawValue]:
    by_variable = {setting.variable: name for name, setting in known.items()}
    given = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in (FILE, HEARTBEAT, PHASE_FILE, LOG_PROCESS):
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


_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse a size: `2GiB`, `2g` and `2147483648` are equal; `2GB` is 2 * 10**9. Raises ValueError."""
    match = _SIZE.fullmatch(text := text.strip())
    if match is None:
        raise ValueError("must be a size such as 2GiB, 512MiB or a number of bytes")
    number, letter, binary = match.groups()
    decimal = not binary and letter and text[-1] in "bB"
    return int(float(number) * (1000 if decimal else 1024) ** " kmgt".index(letter.lower() or " "))
