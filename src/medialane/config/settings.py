"""Every setting: composed of the packages' configurations, each field with its name in `names.NAMES`.

For `arena-size`, the flag is `--arena-size`, the environment variable MEDIALANE_ARENA_SIZE, the line of the TOML file
`arena-size = "2GiB"`.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from medialane.arena.config import ArenaConfig
from medialane.cluster.config import ClusterConfig
from medialane.config.names import NAMES, SectionName
from medialane.core.errors import StartupFailed
from medialane.core.host import ascii_host
from medialane.gateway.config import GatewayConfig
from medialane.media.config import MediaConfig
from medialane.observability.logging import LoggingConfig
from medialane.prepare.config import PrepareConfig
from medialane.routing.config import RoutingConfig
from medialane.rpc.config import RpcConfig
from medialane.store.config import StoreConfig
from medialane.transfer.config import TransferConfig
from medialane.worker.config import WorkerConfig
from medialane.worker.simulated.config import SimulatedConfig

PREFIX: Final = "MEDIALANE_"
#: Read by vLLM's engine processes, which load our plugin before our configuration.
ARENA_DIR: Final = PREFIX + "ARENA_DIR"


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The address on which the gateway serves HTTP."""

    host: Annotated[str, msgspec.Meta(description="address to listen on; 0.0.0.0 is all interfaces")] = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(description="port to listen on")] = 8000

    def validate(self) -> None:
        if not 0 <= self.port <= 65535:
            raise StartupFailed("port must be between 0 and 65535")
        try:
            ascii_host(self.host)
        except ValueError as error:
            raise StartupFailed(f"host: {error}") from error


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
    logging: LoggingConfig = LoggingConfig()

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

    @property
    def flag(self) -> str:
        return "--" + self.name

    @property
    def variable(self) -> str:
        return PREFIX + self.name.replace("-", "_").upper()

    @property
    def unit(self) -> Literal["bytes", "seconds"] | None:
        return "bytes" if self.field.endswith("_bytes") else "seconds" if _is_seconds(self.field) else None


def settings() -> list[Setting]:
    """Return every setting, in the order of the sections."""
    found = []
    for section in msgspec.structs.fields(Config):
        section_name = typing.cast("SectionName", section.name)
        for field in msgspec.structs.fields(section.type):
            kind, description = _unwrap(field.type)
            name = NAMES[section_name][field.name]
            found.append(Setting(name, section_name, field.name, kind, field.default, description))
    return found


def _is_seconds(field: str) -> bool:
    return field.endswith("_s") and not field.endswith("_per_s")


def _unwrap(annotated: Any) -> tuple[Any, str]:
    if typing.get_origin(annotated) is not Annotated:
        return annotated, ""
    kind, *extras = typing.get_args(annotated)
    return kind, next((e.description for e in extras if isinstance(e, msgspec.Meta) and e.description), "")


def _spell_flags(message: str, section: str) -> str:
    """Replace the field names in a message by their flags."""
    flags = {s.field: s.flag for s in settings() if s.section == section}
    names = "|".join(map(re.escape, flags))
    return re.sub(rf"(?<![\w-])({names})(?![\w-])", lambda found: flags[found[1]], message)
