"""The settings of a command: flags and their help, generated from the settings of `medialane.config`, and how a process
reads again what operators change in place (`Reloading`, and `medialane reload`, the command in this file): its log
level, and the contents of files of keys and certificates. It does on SIGHUP, and a gateway when an operator asks.

All or nothing: what may fail (the file of settings, files of keys, certificates) is read before anything changes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from medialane.config import (
    LOG_LEVEL,
    Config,
    SectionName,
    Setting,
    load_config,
    load_logging,
    log_level_file,
    process_environ,
    settings,
)
from medialane.observability.logging import set_level
from medialane.runtime.phase import shown_reload
from medialane.runtime.tasks import WatchedTask
from medialane.types.errors import InvalidRequest, StartupFailed
from medialane.types.setting import format_bytes

if TYPE_CHECKING:  # stores and workers have no gateway
    from medialane.gateway.http.metrics import AskOthers

logger = logging.getLogger(__name__)

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

_LEVEL_FILE = "--log-level-file"

_EPILOG = """\
What is read again: the contents of files of keys (--keys, --admin-key-file, --metrics-key-file) and of certificates
(--ssl-certfile), and the log level in the --config file. Whatever else has changed in that file needs a restart. A file
with an error changes nothing.

SIGHUP to a gateway, store or worker does the same for that process, SIGHUP to `medialane serve` for all that it has
started (in a terminal it stops them).

{key_help}

examples:
  medialane reload
  medialane reload --gateway https://10.0.0.1:8000 --admin-key-file /etc/medialane/admin-key"""

#: What gateways of a port ask each other.
RELOAD = "reload"

#: Reads files again; returns what uses them, and the flags that name them. Raises StartupFailed.
ReadFiles = Callable[[], tuple[Callable[[], None], Sequence[str]]]


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


class SettingsChange(msgspec.Struct, frozen=True):
    """The flags of settings that have changed, and of settings whose `files` were read again. The gateways of the port
    that are `gateways_missing` have not answered, or have failed: they go on as before."""

    changed: list[str] = []
    files: list[str] = []
    gateways_missing: list[str] = []

    def __str__(self) -> str:
        """Return a line for each of them that is not empty."""
        parts = {"changed": self.changed, "files read again": self.files}
        lines = [f"{text}: {', '.join(flags)}" for text, flags in parts.items() if flags]
        lines += [f"gateway {index} has not read its settings again: see its log" for index in self.gateways_missing]
        return "\n".join(lines) or "nothing that is read again has changed (other settings need a restart)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from medialane.cli.workers import KEY_HELP, add_gateway  # imported lazily: processes do without

    parser.epilog = _EPILOG.format(key_help=KEY_HELP)
    add_gateway(parser)


def run(args: argparse.Namespace) -> int:
    """`medialane reload`: 0 if all gateways have read their settings again, 1 if not all. Raises StartupFailed."""
    return asyncio.run(_reload(args))


async def _reload(args: argparse.Namespace) -> int:
    from medialane.cli.workers import connected

    async with connected(args) as gateway:
        change = await gateway.ask(SettingsChange, "POST", "/medialane/reload")
    print(change)
    return int(bool(change.gateways_missing))


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the flag by which `medialane serve` names the file whose log level its processes read again."""
    parser.add_argument(_LEVEL_FILE, metavar="PATH", help=argparse.SUPPRESS)


class Reloading:
    """Has the settings of a process, whose log level alone changes, as the file `level_file` says, if there is
    one. What has files to be read again adds itself to `files`."""

    def __init__(self, config: Config, level_file: str = "") -> None:
        self.config = config
        self.files: list[ReadFiles] = []
        self._level_file = level_file
        self._logging = config.logging
        self._reading = asyncio.Lock()

    @classmethod
    def of(cls, args: argparse.Namespace, sections: Sequence[SectionName]) -> Reloading:
        """Load the settings of a command. Raises StartupFailed."""
        flags = given_settings(args)
        config = load_config(flags, file=args.config, sections=sections)
        if (level_file := vars(args).get("log_level_file")) is None:
            return cls(config, log_level_file(flags, args.config, process_environ()))
        return cls(_with_current_level(config, level_file), level_file)

    @property
    def flags(self) -> list[str]:
        """For the processes that `serve` starts with these settings."""
        return [_LEVEL_FILE, self._level_file] if self._level_file else []

    async def reload(self) -> SettingsChange:
        """Raises StartupFailed naming the setting: then nothing has changed."""
        async with self._reading:
            with shown_reload():
                loaded = self._logging
                if self._level_file:
                    loaded = await asyncio.to_thread(load_logging, self._level_file)
                read = [await asyncio.to_thread(read_files) for read_files in self.files]
                for use, _ in read:
                    use()
            changed = [f"--{LOG_LEVEL}"] if loaded.level != self._logging.level else []
            change = SettingsChange(changed, [flag for _, flags in read for flag in flags])
            logger.warning("settings were read again: %s", "; ".join(str(change).splitlines()))
            self._logging = loaded
            set_level(loaded)
        return change

    async def reload_all(self, ask_others: AskOthers) -> bytes:
        """Reload here and at the other gateways of the port; return the change as JSON. Raises InvalidRequest: then
        nothing has changed."""
        try:
            change = await self.reload()
        except StartupFailed as error:
            raise InvalidRequest(f"no setting was changed: {error.message}") from error
        missing = [index for index, answer in (await ask_others(RELOAD)).items() if answer != b"true"]
        return msgspec.json.encode(msgspec.structs.replace(change, gateways_missing=missing))

    async def answer(self, _path: str) -> bytes:
        """Reload for another gateway of the port."""
        try:
            await self.reload()
        except StartupFailed as error:
            logger.error("no setting was changed: %s", error.message)
            return b"false"
        return b"true"


def _with_current_level(config: Config, level_file: str) -> Config:
    """Return the settings of a process of `serve` with the level of the log that was read again before it started: its
    environment has an older one."""
    try:
        level = load_logging(level_file).level
    except StartupFailed as error:
        logger.error("the log level of the start stays: %s", error.message)
        return config
    return msgspec.structs.replace(config, logging=msgspec.structs.replace(config.logging, level=level))


def hangup_means_reload() -> bool:
    """Return whether SIGHUP has another meaning than that the terminal of this process is gone."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        return True
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return True
    return False


@asynccontextmanager
async def reloaded_by_hangup(reload: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Call `reload` during the block for SIGHUP, if that means so. What it raises as StartupFailed is logged."""
    if not hangup_means_reload():
        yield
        return
    asked, loop = asyncio.Event(), asyncio.get_running_loop()

    async def follow() -> None:
        while True:
            await asked.wait()
            asked.clear()
            try:
                await reload()
            except StartupFailed as error:
                logger.error("no setting was changed: %s", error.message)

    loop.add_signal_handler(signal.SIGHUP, asked.set)
    try:
        async with WatchedTask(follow, "reading settings again"):
            yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
