"""Write docs/reference/settings.md again, from the definitions of the settings: python tests/setting_reference.py"""

from __future__ import annotations

import typing
from importlib import import_module
from pathlib import Path

from medialane.cli.flags import TITLES, default_text
from medialane.config import Setting, settings

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"

_TOP = """\
# Settings

Every setting of medialane, written by `python tests/setting_reference.py` from the definitions of `--help-all`.
[Configuration](../configuration.md) explains the important ones, and where a value is given: as flag, as
`MEDIALANE_...` (the name in capitals, with `_`), as key of a TOML file. What may change: [Stability](stability.md).
A change of a setting needs a restart, but for
[log level, keys and certificates](../deployment.md#keys-certificates-and-log-level).
"""

#: Modules of the commands that have settings by sections.
_COMMANDS = {
    "serve": "serve",
    "render": "render",
    "gateway": "gateway_command",
    "store": "store",
    "worker": "worker_command",
}


def _commands(section: str) -> str:
    modules = {name: import_module(f"medialane.cli.{module}") for name, module in _COMMANDS.items()}
    return ", ".join(f"`{name}`" for name, module in modules.items() if section in module.SECTIONS)


def _values(setting: Setting) -> str:
    if setting.unit is not None:
        return {"bytes": "size", "seconds": "seconds"}[setting.unit]
    if setting.type is bool:
        return "yes, no"
    parts = typing.get_args(setting.type)
    if typing.get_origin(setting.type) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in parts)
    if typing.get_origin(setting.type) is tuple:
        return "list"
    names = {int: "integer", float: "number", str: "text"}
    if parts:
        choices = [choice for part in parts for choice in typing.get_args(part)]
        return ", ".join([*(names[part] for part in parts if part in names), *(f"`{each}`" for each in choices)])
    return names[setting.type]


def _row(setting: Setting) -> str:
    shown = f"`{setting.variable}` only" if setting.is_secret else f"`{setting.flag}`"
    text = setting.description.replace("|", "\\|").replace("<", "&lt;")
    return f"| {shown} | {_values(setting)} | {default_text(setting)} | {text} |\n"


def page() -> str:
    parts = [_TOP]
    for section, title in TITLES.items():
        rows = "".join(_row(setting) for setting in settings() if setting.section == section)
        parts.append(
            f"\n## {title[0].upper()}{title[1:]}\n\nOf {_commands(section)}.\n\n"
            f"| setting | value | default | what it is |\n|---|---|---|---|\n{rows}"
        )
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
