"""Command-line flags and their help, generated from the settings of `medialane.config`."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Collection, Sequence
from typing import Any

from medialane.config import SectionName, Setting, settings
from medialane.types.setting import format_bytes

#: Settings of connections beyond loopback, for the help of the commands that make some.
PROTECTION = ("rpc-secret-file", "rpc-tls-cert", "rpc-tls-key", "rpc-tls-ca", "rpc-insecure")

_DEST = "setting:"
_ALL = "--help-all"

TITLES: dict[SectionName, str] = {
    "server": "HTTP",
    "cluster": "processes",
    "gateway": "gateway",
    "store": "media store",
    "media": "media: limits and sources",
    "prepare": "preparers: processes that decode and process media",
    "arena": "shared memory",
    "handover": "hand-over of media to workers",
    "routing": "routing; costs are in expected milliseconds",
    "rpc": "connections between gateway and workers",
    "worker": "worker",
    "simulated": "simulated workers",
    "environment": "environment of the processes that are started",
    "logging": "logging",
    "recording": "recording of traffic, for `medialane compare`",
    "stop": "stop",
}


def add_settings(
    parser: argparse.ArgumentParser, sections: Sequence[SectionName], *, common: Collection[str] = ()
) -> None:
    """Add a flag to `parser` for each setting of `sections`, and `--config FILE`.

    Help shows the settings named in `common`, and all of them with `--help-all`; without `common` it shows all.
    """
    every = not common or _ALL in (parser.get_default("argv") or ())
    usual = parser.add_argument_group("settings")
    usual.add_argument("--config", metavar="FILE", help="TOML file with the same setting names: arena-size = '2GiB'")
    if common:
        parser.add_argument(_ALL, action="help", help="show this help with every setting, and exit")
    of_sections = [s for s in settings() if s.section in sections and not s.is_secret]
    for setting in (s for s in settings() if s.section in sections and s.is_secret):  # `load_config` refuses it
        _add(usual, setting, visible=False)
    for setting in sorted((s for s in of_sections if s.name in common), key=lambda s: list(common).index(s.name)):
        _add(usual, setting, visible=True)
    for section in sections:
        rest = [s for s in of_sections if s.section == section and s.name not in common]
        group = parser.add_argument_group(TITLES[section])
        for setting in rest:
            _add(group, setting, visible=every)


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the raw values of the settings given on the command line, by name."""
    return {k.removeprefix(_DEST): v for k, v in vars(args).items() if k.startswith(_DEST)}


def _add(group: argparse._ArgumentGroup, setting: Setting, *, visible: bool) -> None:
    text = f"{setting.description} (default {default_text(setting)})".replace("%", "%%")
    shown = text if visible else argparse.SUPPRESS
    dest, flag = _DEST + setting.name, setting.flag
    if setting.type is bool:
        group.add_argument(
            flag, dest=dest, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=shown
        )
    elif typing.get_origin(setting.type) is typing.Literal:
        choices = [str(choice) for choice in typing.get_args(setting.type)]
        group.add_argument(flag, dest=dest, choices=choices, default=argparse.SUPPRESS, help=shown)
    else:
        group.add_argument(flag, dest=dest, metavar=_metavar(setting), default=argparse.SUPPRESS, help=shown)


def _metavar(setting: Setting) -> str:
    if setting.unit is not None:
        return {"bytes": "SIZE", "seconds": "SECONDS"}[setting.unit]
    if setting.type in (int, float):
        return "N"
    return "A,B,..." if typing.get_origin(setting.type) is tuple else setting.name.rpartition("-")[2].upper()


def default_text(setting: Setting) -> str:
    """Return the default of a setting as help and documentation show it."""
    value = setting.default
    if setting.unit == "bytes" and isinstance(value, int):
        return format_bytes(value)
    if setting.unit == "seconds" and isinstance(value, float):
        return f"{value:g} s"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value in (None, "") else str(value)
