"""Settings that are read again while a process runs: which of them may change then, and how they do.

Flags and environment of a process cannot change: what is read again is the file of settings, and the files that
settings name. Sections are frozen for all who use them; this module alone replaces values of the running ones, on the
event loop, so that whoever reads a value when it is needed has the new one. Whoever keeps one is told by the process
that reloads (`cli.reloading`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self

import msgspec

from medialane.config.environment import as_environ
from medialane.config.loading import FILE, MODELS, TableRules, load_config, load_models
from medialane.config.settings import PREFIX, Config, SectionName, Setting, settings
from medialane.core.errors import StartupFailed
from medialane.core.private_file import write_private

_LOG: Final = frozenset({"log-level"})
#: What may change while a gateway runs.
_GATEWAY: Final = frozenset({
    "admin-key-file", "metrics-key-file",
    "encode-at", "gateway-encode-timeout", "gateway-max-requests", "gateway-ttft-limit", "gateway-queue-requests",
    "gateway-queue-bytes", "gateway-queue-timeout", "gateway-queue-target", "require-salt", "gateway-max-text-bytes",
    "gateway-max-body-values", "gateway-max-body-depth", "gateway-max-messages", "gateway-max-tools",
    "gateway-max-prompts", "gateway-max-token-ids", "gateway-min-body-rate-bytes-per-s", "gateway-min-body-rate-grace",
    "gateway-forget-worker", "gateway-max-joined-workers", "migration-limit", "migration-timeout",
    "gateway-admin-timeout", "media-max-body-bytes", "media-max-items", "media-max-batch-items",
    "routing-prefill-ms-per-token", "routing-encoder-ms-per-token", "routing-load-ms-per-mib", "routing-request-ms",
    "routing-contention-weight", "routing-running-ms", "routing-over-capacity-ms", "routing-kv-pressure-ms",
    "routing-kv-pressure-threshold", "routing-local-ms-per-mib", "routing-remote-ms", "routing-remote-ms-per-mib",
    "routing-session-ms", "routing-temperature-ms", "routing-max-in-flight",
})  # fmt: skip
#: Of those, what has parts of the gateway that exist only if it is not 0.
_ON_OR_OFF: Final = frozenset({"gateway-ttft-limit", "gateway-queue-requests"})

Command = Literal["serve", "gateway", "name-router", "store", "worker"]

#: What may change while processes run, by the command. `serve` has the processes that it has started do it.
LIVE: Final[Mapping[Command, frozenset[str]]] = {
    "serve": _LOG | _GATEWAY,
    "gateway": _LOG | _GATEWAY,
    "name-router": _LOG | {"admin-key-file", "metrics-key-file"},
    "store": _LOG,
    "worker": _LOG,
}


class SettingsSource(msgspec.Struct, frozen=True):
    """What the settings of a process were loaded from: flags, our variables but secrets, and the file; if that has
    tables of models, by which `rules`, and which `table`: that of the process's model, none for those of all."""

    sections: tuple[SectionName, ...]
    flags: dict[str, Any] = {}
    environ: dict[str, str] = {}
    file: str | None = None
    rules: TableRules | None = None
    table: str = ""

    @classmethod
    def of(
        cls,
        sections: Iterable[SectionName],
        flags: Mapping[str, Any],
        file: str | None,
        environ: Mapping[str, str],
        *,
        rules: TableRules | None = None,
    ) -> Self:
        """Return the source of what `load_config` returns for these, or with `rules`, `load_models`."""
        secret = {setting.variable for setting in settings() if setting.is_secret}
        ours = {name: value for name, value in environ.items() if name.startswith(PREFIX) and name not in secret}
        return cls(tuple(sections), dict(flags), ours, file or environ.get(FILE), rules)

    def of_model(self, table: str) -> Self:
        return msgspec.structs.replace(self, table=table)

    @classmethod
    def read(cls, path: str) -> Self:
        """Read what `write` has written. Raises StartupFailed."""
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise StartupFailed(f"{path}: the source of the settings cannot be read: {error}") from error

    def write(self, path: Path) -> None:
        write_private(path, msgspec.json.encode(self))

    def load(self, running: Config) -> Config:
        """Read the file again; secrets are those of the `running` process. Raises StartupFailed naming the setting."""
        secret = {setting.variable for setting in settings() if setting.is_secret}
        secrets = {name: value for name, value in as_environ(running).items() if name in secret}
        environ = self.environ | secrets
        if self.rules is None:
            return load_config(self.flags, file=self.file, environ=environ, sections=self.sections)
        config, tables = load_models(
            self.flags, file=self.file, environ=environ, sections=self.sections, rules=self.rules
        )
        if not self.table:
            return config
        own = next((table.config for table in tables if table.name == self.table), None)
        if own is None:
            raise StartupFailed(f"{self.file}: the table {MODELS}.{self.table} is gone, and its model runs: restart")
        return own


class SettingsChange(msgspec.Struct, frozen=True):
    """The flags of the settings that have changed: at once, and those that need a restart of the process. `files` are
    those of settings with files that were read again."""

    changed: list[str] = []
    needs_restart: list[str] = []
    files: list[str] = []

    def __str__(self) -> str:
        parts = {"changed": self.changed, "needs a restart": self.needs_restart}
        texts = [f"{text}: {', '.join(flags)}" for text, flags in parts.items() if flags]
        return "; ".join(texts) or "no setting has changed"

    def __or__(self, other: SettingsChange) -> SettingsChange:
        """Return both, of two processes."""
        return SettingsChange(
            sorted({*self.changed, *other.changed}),
            sorted({*self.needs_restart, *other.needs_restart}),
            sorted({*self.files, *other.files}),
        )


class ReloadAnswer(SettingsChange, frozen=True):
    """What has changed at the gateways of a port. `gateways_missing` have not answered, or have failed: they go on as
    before."""

    gateways_missing: list[str] = []


def change_of(running: Config, loaded: Config, live: frozenset[str], sections: Iterable[SectionName]) -> SettingsChange:
    """Return what differs in these sections between the settings that a process has and those of its source; `live` may
    change while it runs. What another process changes is left out."""
    changed: list[str] = []
    needs_restart: list[str] = []
    for setting in _differing(running, loaded, sections):
        is_live = setting.name in live
        if setting.name in _ON_OR_OFF:
            is_live = is_live and bool(_value(running, setting)) and bool(_value(loaded, setting))
        if is_live:
            changed.append(setting.flag)
        elif setting.name in live or setting.name not in LIVE["serve"]:
            needs_restart.append(setting.flag)
    return SettingsChange(changed, needs_restart)


def take_over(running: Config, loaded: Config, flags: Iterable[str]) -> None:
    """Replace the values of the settings with these flags, for all who use the sections of `running`."""
    wanted = set(flags)
    for setting in settings():
        if setting.flag in wanted:
            replace(getattr(running, setting.section), setting.field, _value(loaded, setting))


def replace(section: msgspec.Struct, field: str, value: Any) -> None:
    """Replace one value of a section."""
    msgspec.structs.force_setattr(section, field, value)


def _differing(one: Config, other: Config, sections: Iterable[SectionName]) -> Iterable[Setting]:
    of_sections = set(sections)
    for setting in settings():
        if setting.section in of_sections and not setting.is_secret and _value(one, setting) != _value(other, setting):
            yield setting


def _value(config: Config, setting: Setting) -> Any:
    return getattr(getattr(config, setting.section), setting.field)
