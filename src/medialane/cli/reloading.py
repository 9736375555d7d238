"""How a process reads its settings again: on SIGHUP, and a gateway when an operator asks for it.

All or nothing: what may fail (the file of settings, files of keys, certificates) is read before anything changes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from medialane.cli.flags import given_settings
from medialane.config import Config, SectionName, load_config, process_environ
from medialane.config.reloading import LIVE, Command, SettingsChange, SettingsSource, change_of, take_over
from medialane.core.errors import StartupFailed
from medialane.core.process.systemd import shown_reload
from medialane.core.watched_task import WatchedTask
from medialane.observability.logging import set_level

logger = logging.getLogger(__name__)

_SOURCE = "--settings-source"

#: Given what was loaded, reads the files that settings name; returns what uses them, and their flags. Raises
#: StartupFailed.
Prepare = Callable[[Config], Awaitable[tuple[Callable[[], None], Sequence[str]]]]


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the flag by which `medialane serve` tells its processes where its own settings come from."""
    parser.add_argument(_SOURCE, metavar="PATH", help=argparse.SUPPRESS)


def source_flags(path: str) -> list[str]:
    return [_SOURCE, path]


async def _nothing(_loaded: Config) -> tuple[Callable[[], None], Sequence[str]]:
    return lambda: None, ()


class Reloading:
    """Reads the settings of a process again. `running` is what its parts use, `known` what its source had before."""

    def __init__(self, command: Command, running: Config, source: SettingsSource | None = None) -> None:
        """Without a source, no setting changes."""
        self._live = LIVE[command]
        self._running = self._known = running
        self._source = source or SettingsSource(())
        self._reading = asyncio.Lock()
        self.prepare: Prepare = _nothing

    @classmethod
    def of(cls, command: Command, args: argparse.Namespace, sections: Sequence[SectionName]) -> Reloading:
        """Load the settings of a command. Raises StartupFailed."""
        flags, environ = given_settings(args), process_environ()
        running = load_config(flags, file=args.config, sections=sections)
        if (path := vars(args).get("settings_source")) is None:
            return cls(command, running, SettingsSource.of(sections, flags, args.config, environ))
        reloading = cls(command, running, SettingsSource.read(path))
        reloading._catch_up()
        return reloading

    @property
    def config(self) -> Config:
        return self._running

    @property
    def source(self) -> SettingsSource:
        return self._source

    def _catch_up(self) -> None:
        """Have the values that were read again before this process was started: its environment has older ones."""
        try:
            self._known = self._source.load(self._running)
        except StartupFailed as error:
            logger.error("the settings of the start are used: %s", error.message)
        else:
            take_over(self._running, self._known, [f"--{name}" for name in self._live])

    async def reload(self) -> SettingsChange:
        """Raises StartupFailed naming the setting: then nothing has changed."""
        async with self._reading:
            with shown_reload():
                loaded = await asyncio.to_thread(self._source.load, self._running)
                use_files, files = await self.prepare(loaded)
                change = change_of(self._known, loaded, self._live, self._source.sections)
                for config in (self._running, self._known):
                    take_over(config, loaded, change.changed)
                use_files()
        change = SettingsChange(change.changed, change.needs_restart, list(files))
        logger.warning("settings were read again: %s", change)
        set_level(self._running.logging)
        return change


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
