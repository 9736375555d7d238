"""Every setting: composed of the packages' configurations.

For `arena-size`, the flag is `--arena-size`, the environment variable MEDIALANE_ARENA_SIZE, the line of the TOML file
`arena-size = "2GiB"`.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import field

from medialane.arena.config import ArenaConfig
from medialane.config.cluster import ClusterConfig
from medialane.gateway import GatewayConfig, RecordingConfig, TransferConfig
from medialane.media.config import MediaConfig
from medialane.observability.logging import LoggingConfig
from medialane.prepare.config import PrepareConfig
from medialane.routing.config import RoutingConfig
from medialane.runtime.host import ascii_host
from medialane.runtime.stop import StopConfig
from medialane.store.config import StoreConfig
from medialane.testing.simulated.config import SimulatedConfig
from medialane.types.errors import StartupFailed
from medialane.types.setting import descriptions, is_secret
from medialane.wire.config import RpcConfig
from medialane.worker.config import WorkerConfig

SectionName = Literal[
    "server", "cluster", "gateway", "store", "media", "prepare", "arena", "transfer", "routing", "rpc", "worker",
    "simulated", "environment", "logging", "recording", "stop",
]  # fmt: skip

PREFIX: Final = "MEDIALANE_"


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The address on which the gateway serves HTTP."""

    host: str = field(default="127.0.0.1", name="host")
    """address to listen on; 0.0.0.0 is all interfaces"""
    port: int = field(default=8000, name="port")
    """port to listen on"""

    def validate(self) -> None:
        if not 0 <= self.port <= 65535:
            raise StartupFailed("port must be between 0 and 65535")
        try:
            ascii_host(self.host)
        except ValueError as error:
            raise StartupFailed(f"host: {error}") from error


class EnvironmentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What processes inherit besides the variables that they are known to need (`environment`)."""

    pass_env: tuple[str, ...] = field(default=(), name="pass-env")
    """further environment variables for the processes that are started, by name or pattern (MY_MODEL_*); those that
    look like secrets (..._KEY, ..._TOKEN, ..._SECRET, ..._PASSWORD) are kept from preparers and the NIXL mover"""

    def validate(self) -> None:
        if any("=" in name for name in self.pass_env):
            raise StartupFailed("pass_env takes names: values are those of this process's environment")


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of every package."""

    server: ServerConfig = ServerConfig()
    cluster: ClusterConfig = ClusterConfig()
    gateway: GatewayConfig = GatewayConfig()
    store: StoreConfig = StoreConfig()
    media: MediaConfig = MediaConfig()
    prepare: PrepareConfig = PrepareConfig()
    arena: ArenaConfig = ArenaConfig()
    transfer: TransferConfig = TransferConfig()
    routing: RoutingConfig = RoutingConfig()
    rpc: RpcConfig = RpcConfig()
    worker: WorkerConfig = WorkerConfig()
    simulated: SimulatedConfig = SimulatedConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    logging: LoggingConfig = LoggingConfig()
    recording: RecordingConfig = RecordingConfig()
    stop: StopConfig = StopConfig()

    def validate(self, sections: Iterable[SectionName]) -> None:
        """Raise StartupFailed, with flags instead of field names, if a setting of `sections` is invalid."""
        for section in sections:
            try:
                getattr(self, section).validate()
            except StartupFailed as error:
                raise StartupFailed(_spell_flags(error.message, section)) from error


class Setting(NamedTuple):
    """One field of one section, and its user-visible name."""

    name: str
    section: SectionName
    field: str
    type: Any
    default: Any
    description: str
    is_secret: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name

    @property
    def variable(self) -> str:
        return PREFIX + self.name.replace("-", "_").upper()

    @property
    def unit(self) -> Literal["bytes", "seconds"] | None:
        return "bytes" if self.field.endswith("_bytes") else "seconds" if _is_seconds(self.field) else None


@cache
def settings() -> tuple[Setting, ...]:
    """Return every setting, in the order of the sections."""
    collected = []
    for name, section in typing.get_type_hints(Config).items():
        texts = descriptions(section)
        for each in msgspec.structs.fields(section):
            kind = typing.get_args(each.type)[0] if typing.get_origin(each.type) is Annotated else each.type
            section_name = typing.cast("SectionName", name)
            text, secret = texts[each.name], is_secret(each.type)
            collected.append(Setting(each.encode_name, section_name, each.name, kind, each.default, text, secret))
    return tuple(collected)


def _is_seconds(field: str) -> bool:
    return field.endswith("_s") and not field.endswith("_per_s")


def _spell_flags(message: str, section: str) -> str:
    """Replace the field names in a message by their flags."""
    flags = {s.field: s.flag for s in settings() if s.section == section}
    names = "|".join(map(re.escape, flags))
    return re.sub(rf"(?<![\w-])({names})(?![\w-])", lambda name: flags[name[1]], message)
