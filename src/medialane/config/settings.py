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
from medialane.gateway import GatewayConfig, HandoverConfig, RecordingConfig
from medialane.media.config import MediaConfig
from medialane.observability.logging import LoggingConfig
from medialane.prepare.config import PrepareConfig
from medialane.routing.config import RoutingConfig
from medialane.runtime.stop import StopConfig
from medialane.store.config import StoreConfig
from medialane.testing.simulated.config import SimulatedConfig
from medialane.types.errors import StartupFailed
from medialane.types.request import WorkerRole
from medialane.types.setting import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    ascii_host,
    check_bounds,
    descriptions,
    is_secret,
)
from medialane.wire.address import parse_tcp
from medialane.wire.config import RpcConfig
from medialane.worker.config import WorkerConfig

SectionName = Literal[
    "server", "cluster", "gateway", "store", "media", "prepare", "arena", "handover", "routing", "rpc", "worker",
    "simulated", "environment", "logging", "recording", "stop",
]  # fmt: skip

PREFIX: Final = "MEDIALANE_"

MIB = 1 << 20
#: `--gateways auto`: vLLM's engines, preparers and the store need the other cores.
_CORES_PER_GATEWAY = 4
_MAX_AUTO_GATEWAYS = 8


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The address on which the gateway serves HTTP."""

    host: str = field(default="127.0.0.1", name="host")
    """address to listen on; 0.0.0.0: all interfaces"""
    port: int = field(default=8000, name="port")
    """port to listen on"""

    def validate(self) -> None:
        if not 0 <= self.port <= 65535:
            raise StartupFailed("port must be between 0 and 65535")
        try:
            ascii_host(self.host)
        except ValueError as error:
            raise StartupFailed(f"host: {error}") from error


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The number of processes, and the timeouts of starts, stops and restarts."""

    num_workers: NonNegativeInt = field(default=1, name="workers")
    """vLLM workers on this machine, with --ray in the cluster; 0: only workers that join (--join-listen)"""
    num_prefill: NonNegativeInt = field(default=0, name="prefill")
    """vLLM workers that only compute prompts, for the KV caches of those of --decode"""
    num_decode: NonNegativeInt = field(default=0, name="decode")
    """vLLM workers, instead of --workers, that generate with prompts of --prefill"""
    num_encoders: NonNegativeInt = field(default=0, name="encoders")
    """vLLM workers on this machine, besides --workers, that only encode new media"""
    encoder_gpu_share: NonNegativeFloat = field(default=0.0, name="encoder-gpu-share")
    """part of a worker's GPU memory for encoders that share its GPUs; 0: own GPUs, with --single-gpu an equal part"""
    num_gateways: int | Literal["auto"] = field(default=1, name="gateways")
    """gateway processes that share the port; auto: one per four cores, at most 8"""
    single_gpu: bool = field(default=False, name="single-gpu")
    """all workers share the first GPU and split its memory; they start one after another"""
    ray: bool = field(default=False, name="ray")
    """let Ray place and restart the workers; run the command on a node of the cluster"""
    ray_address: str = field(default="", name="address")
    """Ray cluster: HOST:PORT of its head; default: RAY_ADDRESS, this host's cluster, or a new one"""
    gateway_nodes: Literal["head", "each"] = field(default="head", name="gateway-nodes")
    """where gateways run with --ray: head (this node), each (all nodes at the start, each with a store)"""
    gpus_per_worker: int | Literal["auto"] = field(default="auto", name="gpus-per-worker")
    """GPUs that Ray reserves per worker; auto: what the vLLM flags need, 0 for vLLM's CPU build"""
    cpus_per_worker: PositiveFloat = field(default=1.0, name="cpus-per-worker")
    """CPUs that Ray reserves per worker; without a GPU, also its number of threads"""
    warm_start: bool = field(default=True, name="warm-start")
    """import vLLM and read the model once per host, in a process from which the others are forked; no: a slower start,
    more memory"""
    start_timeout_s: PositiveFloat = field(default=1800.0, name="start-timeout")
    """longest time until a worker has loaded its model and the gateway answers"""
    stop_timeout_s: PositiveFloat = field(default=40.0, name="stop-timeout")
    """how long a worker may take to stop before it is killed"""
    restart_initial_s: float = field(default=1.0, name="restart-initial")
    """delay before an exited process is restarted; doubles each time. After it had been ready: at once, then after at
    most 4 s"""
    restart_max_s: float = field(default=30.0, name="restart-max")
    """longest delay before a restart"""
    restart_reset_s: PositiveFloat = field(default=60.0, name="restart-reset")
    """time without an exit that resets the restart delay"""
    log_dir: str = field(default="", name="log-dir")
    """folder of log files, one per process, appended to and kept; default: in TMPDIR, kept only after a failure (the
    newest five)"""
    max_log_bytes: int = field(default=16 * MIB, name="max-log-bytes")
    """size at which a log file is rotated; the newer half is kept as .old"""

    def validate(self) -> None:
        """Raise StartupFailed naming the invalid setting."""
        check_bounds(self)
        if self.num_gateways != "auto" and self.num_gateways < 1:
            raise StartupFailed("num_gateways must be at least 1, or auto")
        if self.gpus_per_worker != "auto" and self.gpus_per_worker < 0:
            raise StartupFailed("gpus_per_worker must not be negative")
        self._check_ray()
        self._check_encoders()
        self._check_split()
        if not 0 < self.restart_initial_s <= self.restart_max_s:
            raise StartupFailed("restart_initial_s must be positive and at most restart_max_s")
        if self.max_log_bytes < MIB:
            raise StartupFailed("max_log_bytes must be at least 1MiB")

    def _check_ray(self) -> None:
        if self.ray and self.single_gpu:
            raise StartupFailed("single_gpu is for workers of this host, without --ray")
        if self.ray_address and not self.ray:
            raise StartupFailed("ray_address needs --ray")
        if "://" not in self.ray_address and self.ray_address not in ("", "auto", "local"):
            parse_tcp(self.ray_address, "--address", to_connect=True)
        if self.gateway_nodes != "head" and not self.ray:
            raise StartupFailed("gateway_nodes needs --ray")
        if self.ray and not self.roles:
            raise StartupFailed("num_workers must be at least 1 with --ray")

    def _check_encoders(self) -> None:
        if self.ray and self.num_encoders:
            raise StartupFailed("num_encoders is for this host, without --ray: encoders write to the gateway's arena")
        if self.encoder_gpu_share >= 1:
            raise StartupFailed("encoder_gpu_share must be less than 1")
        if self.encoder_gpu_share and not self.num_encoders:
            raise StartupFailed("encoder_gpu_share needs --encoders")

    def _check_split(self) -> None:
        if bool(self.num_prefill) != bool(self.num_decode):
            raise StartupFailed("num_prefill and num_decode must be given together")
        if self.num_decode and self.num_workers > 1:
            raise StartupFailed("num_workers is without --prefill and --decode, which start workers of their own")

    @property
    def roles(self) -> list[WorkerRole]:
        """The role of each worker that this configuration starts, without encoders."""
        numbers: dict[WorkerRole, int] = {"prefill": self.num_prefill, "decode": self.num_decode}
        if not self.num_decode:
            numbers = {"worker": self.num_workers}
        return [role for role, number in numbers.items() for _ in range(number)]

    def resolved_num_gateways(self, num_cores: int) -> int:
        """Return the number of gateways on a host with this many cores."""
        if self.num_gateways == "auto":
            return max(1, min(_MAX_AUTO_GATEWAYS, num_cores // _CORES_PER_GATEWAY))
        return self.num_gateways


class EnvironmentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What processes inherit besides the variables that they are known to need (`environment`)."""

    pass_env: tuple[str, ...] = field(default=(), name="pass-env")
    """further environment variables for started processes, by name or pattern (MY_MODEL_*); secret-looking ones
    (..._KEY, ..._TOKEN, ..._SECRET, ..._PASSWORD) are kept from preparers and the NIXL mover"""

    def validate(self) -> None:
        if any("=" in name for name in self.pass_env):
            raise StartupFailed("pass_env takes names: values are taken from this process's environment")


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of every package."""

    server: ServerConfig = ServerConfig()
    cluster: ClusterConfig = ClusterConfig()
    gateway: GatewayConfig = GatewayConfig()
    store: StoreConfig = StoreConfig()
    media: MediaConfig = MediaConfig()
    prepare: PrepareConfig = PrepareConfig()
    arena: ArenaConfig = ArenaConfig()
    handover: HandoverConfig = HandoverConfig()
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
