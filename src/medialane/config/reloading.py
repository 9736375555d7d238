"""What a process does to find out which settings have changed since its start: it loads them again from their source.

Settings themselves stay what they are while a process runs, but for the level of its log. What operators change in
place are that, and the contents of files of keys and certificates (`cli.reloading`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from medialane.config.environment import settings_environ
from medialane.config.loading import FILE, MODELS, TableRules, load_config, load_models
from medialane.config.settings import PREFIX, Config, SectionName, settings
from medialane.runtime.private_files import write_private
from medialane.types.errors import StartupFailed

#: The setting that changes without a restart.
LIVE: Final = "log-level"


class SettingsSource(msgspec.Struct, frozen=True):
    """Where the settings of a process were loaded from: flags, our variables but secrets, and the file; if that has
    tables of models, by which `rules`, and which `table`: that of the process's model, none for those of all. `started`
    is what was loaded, as variables without secrets."""

    sections: tuple[SectionName, ...]
    started: dict[str, str]
    flags: dict[str, Any] = {}
    environ: dict[str, str] = {}
    file: str | None = None
    rules: TableRules | None = None
    table: str = ""

    @classmethod
    def of(
        cls,
        config: Config,
        *,
        sections: Iterable[SectionName],
        flags: Mapping[str, Any],
        file: str | None,
        environ: Mapping[str, str],
        rules: TableRules | None = None,
    ) -> Self:
        """Return the source of `config`, which `load_config` has returned for these, or with `rules`, `load_models`."""
        secret = {setting.variable for setting in settings() if setting.is_secret}
        ours = {name: value for name, value in environ.items() if name.startswith(PREFIX) and name not in secret}
        started = settings_environ(config)
        return cls(tuple(sections), started, dict(flags), ours, file or environ.get(FILE), rules)

    def of_model(self, table: str, config: Config) -> Self:
        return msgspec.structs.replace(self, table=table, started=settings_environ(config))

    @classmethod
    def read(cls, path: str) -> Self:
        """Read what `write` has written. Raises StartupFailed."""
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise StartupFailed(f"{path}: the source of the settings cannot be read: {error}") from error

    def write(self, path: Path) -> None:
        write_private(path, msgspec.json.encode(self))

    def load(self) -> Config:
        """Load the settings again, without secrets. Raises StartupFailed naming the setting."""
        if self.rules is None:
            return load_config(self.flags, file=self.file, environ=self.environ, sections=self.sections)
        config, tables = load_models(
            self.flags, file=self.file, environ=self.environ, sections=self.sections, rules=self.rules
        )
        if not self.table:
            return config
        own = next((table.config for table in tables if table.name == self.table), None)
        if own is None:
            raise StartupFailed(f"{self.file}: the table {MODELS}.{self.table} is gone, and its model runs: restart")
        return own

    def needs_restart(self, loaded: Config) -> list[str]:
        """Return the flags of the settings that differ from those of the start: they take effect at the next one."""
        now = settings_environ(loaded)
        return [
            setting.flag
            for setting in settings()
            if setting.section in self.sections and setting.name != LIVE
            if now.get(setting.variable) != self.started.get(setting.variable)
        ]


class SettingsChange(msgspec.Struct, frozen=True):
    """The flags of the settings that have changed at once, of those that need a restart of the process, and of those
    whose `files` were read again. The gateways of the port that are `gateways_missing` have not answered, or have
    failed: they go on as before."""

    changed: list[str] = []
    needs_restart: list[str] = []
    files: list[str] = []
    gateways_missing: list[str] = []

    def __str__(self) -> str:
        """Return a line for each of them that is not empty."""
        parts = {"changed": self.changed, "files read again": self.files, "needs a restart": self.needs_restart}
        lines = [f"{text}: {', '.join(flags)}" for text, flags in parts.items() if flags]
        lines += [f"gateway {index} has not read its settings again: see its log" for index in self.gateways_missing]
        return "\n".join(lines) or "no setting has changed"
