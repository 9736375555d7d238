"""All settings: the rooms' configurations composed, and where their values come from.

A setting has one name. For the arena's size it is `arena-size`: the flag is `--arena-size`, the environment variable
MEDIALANE_ARENA_SIZE, the line of the TOML file `arena-size = "2GiB"`. A flag wins over the environment, the environment
over the file, the file over the default. An unknown name is an error in each of the three.

Names are made from the structs: the room, then the field without `num_`, without the `_s` of seconds, and without the
room's name again. Rooms that speak of the whole (`server`, `cluster`) are left out, and so is the room where the field
says it all.

This is the only file that reads or writes the process's environment, and it does so only when asked.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from medialane.arena.config import ArenaConfig
from medialane.cluster.config import ClusterConfig
from medialane.core.errors import StartupFailed
from medialane.core.host import ascii_host
from medialane.gateway.config import GatewayConfig
from medialane.media.config import MediaConfig
from medialane.observability.logging import LoggingConfig
from medialane.prepare.config import PrepareConfig
from medialane.routing.config import RoutingConfig
from medialane.rpc.config import RpcConfig
from medialane.transfer.config import TransferConfig
from medialane.worker.config import WorkerConfig
from medialane.worker.simulated.config import SimulatedConfig

PREFIX: Final = "MEDIALANE_"
#: Told to vLLM's engine processes, which load our plugin before they have any configuration of ours.
ARENA_DIR: Final = PREFIX + "ARENA_DIR"
_FILE: Final = PREFIX + "CONFIG"

RoomName = Literal[
    "server",
    "cluster",
    "gateway",
    "media",
    "prepare",
    "arena",
    "transfer",
    "routing",
    "rpc",
    "worker",
    "simulated",
    "logging",
]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the gateway answers HTTP."""

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
    """Every room's configuration."""

    server: ServerConfig = ServerConfig()
    cluster: ClusterConfig = ClusterConfig()
    gateway: GatewayConfig = GatewayConfig()
    media: MediaConfig = MediaConfig()
    prepare: PrepareConfig = PrepareConfig()
    arena: ArenaConfig = ArenaConfig()
    transfer: TransferConfig = TransferConfig()
    routing: RoutingConfig = RoutingConfig()
    rpc: RpcConfig = RpcConfig()
    worker: WorkerConfig = WorkerConfig()
    simulated: SimulatedConfig = SimulatedConfig()
    logging: LoggingConfig = LoggingConfig()

    def validate(self, rooms: Iterable[RoomName]) -> None:
        """Raise StartupFailed if a setting of `rooms` cannot be, in the spelling of the command line."""
        for room in rooms:
            try:
                getattr(self, room).validate()
            except StartupFailed as error:
                raise StartupFailed(_spell_flags(error.message, room)) from error


class Setting(NamedTuple):
    """One field of one room, and its name outside."""

    name: str
    room: RoomName
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


_PREFIXES: Final[Mapping[str, str]] = {"server": "", "cluster": "", "logging": "log-"}
_SHORT: Final[Mapping[tuple[str, str], str]] = {
    ("arena", "size_bytes"): "arena-size",
    ("gateway", "stage"): "stage",
    ("media", "allowed_media_domains"): "allow-media-domain",
    ("media", "allowed_media_networks"): "allow-media-network",
    ("media", "allowed_local_media_path"): "allowed-local-media-path",
    ("media", "jpeg_scaled_decode"): "jpeg-scaled-decode",
    ("prepare", "num_preparers"): "preparers",
    ("simulated", "speedup"): "speedup",
    ("transfer", "transport"): "transport",
    ("routing", "router"): "router",
}


def settings() -> list[Setting]:
    """Every setting there is, in the order of the rooms."""
    found = []
    for room in msgspec.structs.fields(Config):
        for field in msgspec.structs.fields(room.type):
            kind, description = _unwrap(field.type)
            name = _setting_name(room.name, field.name)
            found.append(
                Setting(name, typing.cast("RoomName", room.name), field.name, kind, field.default, description)
            )
    return found


def _is_seconds(field: str) -> bool:
    return field.endswith("_s") and not field.endswith("_per_s")


def _setting_name(room: str, field: str) -> str:
    if (room, field) in _SHORT:
        return _SHORT[room, field]
    words = field.removeprefix("num_").split("_")
    if _is_seconds(field):
        words.pop()
    return _PREFIXES.get(room, room + "-") + "-".join(word for word in words if word != room)


def _unwrap(annotated: Any) -> tuple[Any, str]:
    if typing.get_origin(annotated) is not Annotated:
        return annotated, ""
    kind, *extras = typing.get_args(annotated)
    return kind, next((e.description for e in extras if isinstance(e, msgspec.Meta) and e.description), "")


def _spell_flags(message: str, room: str) -> str:
    """Rooms name their own fields; whoever reads the message knows flags."""
    flags = {s.field: s.flag for s in settings() if s.room == room}
    names = "|".join(map(re.escape, flags))
    return re.sub(rf"(?<![\w-])({names})(?![\w-])", lambda found: flags[found[1]], message)


class _Given(NamedTuple):
    value: Any
    source: str


def load_config(
    flags: Mapping[str, Any] | None = None,
    *,
    file: str | None = None,
    environ: Mapping[str, str] | None = None,
    rooms: Iterable[RoomName] = (),
) -> Config:
    """Put the configuration together, and validate `rooms`.

    `flags` are raw values by setting name; `environ` is the process's environment unless given. Raises StartupFailed
    naming the setting, and where its value came from.
    """
    environ = os.environ if environ is None else environ
    known = {setting.name: setting for setting in settings()}
    given: dict[str, _Given] = {}
    given |= _from_file(file or environ.get(_FILE), known)
    given |= _from_environ(environ, known)
    given |= {name: _Given(value, "--" + name) for name, value in (flags or {}).items()}
    config = _build(given, known)
    config.validate(rooms)
    return config


def as_environ(config: Config) -> dict[str, str]:
    """The environment variables from which another process loads an equal configuration. Defaults are left out.

    A process's environment is private to its user, where its command line is not: the token may travel this way.
    """
    found = {}
    for setting in settings():
        value = getattr(getattr(config, setting.room), setting.field)
        if value != setting.default:
            found[setting.variable] = value if isinstance(value, str) else json.dumps(msgspec.to_builtins(value))
    return found


def _from_file(path: str | None, known: Mapping[str, Setting]) -> dict[str, _Given]:
    if not path:
        return {}
    try:
        table = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise StartupFailed(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupFailed(f"the configuration file {path} is not TOML: {error}") from error
    for name in table:
        if name not in known:
            raise StartupFailed(f"{path}: unknown setting {name}{_guess(name, known)}")
    return {name: _Given(value, f"{path}: {name}") for name, value in table.items()}


def _from_environ(environ: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, _Given]:
    by_variable = {setting.variable: name for name, setting in known.items()}
    given = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in (_FILE, ARENA_DIR):
            continue
        if variable not in by_variable:
            raise StartupFailed(f"unknown environment variable {variable}{_guess(variable, by_variable)}")
        given[by_variable[variable]] = _Given(value, variable)
    return given


def _guess(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; is {close[0]} meant?" if close else ""


def _build(given: Mapping[str, _Given], known: Mapping[str, Setting]) -> Config:
    fields: dict[str, dict[str, Any]] = {}
    for name, (value, source) in given.items():
        if name not in known:
            raise StartupFailed(f"unknown setting {source}{_guess(name, known)}")
        setting = known[name]
        fields.setdefault(setting.room, {})[setting.field] = _convert(setting, value, source)
    rooms = {room.name: room.type(**fields.get(room.name, {})) for room in msgspec.structs.fields(Config)}
    return Config(**rooms)


def _convert(setting: Setting, value: Any, source: str) -> Any:
    try:
        if setting.unit == "bytes" and isinstance(value, str):
            value = parse_size(value)
        elif _is_list(setting.type) and isinstance(value, str):
            value = json.loads(value) if value.startswith("[") else [v.strip() for v in value.split(",") if v.strip()]
        return msgspec.convert(value, setting.type, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        shown = "" if "token" in setting.field else f" {value!r}"
        raise StartupFailed(f"{source}{shown}: {_plain(str(error), setting)}") from error


def _is_list(kind: Any) -> bool:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(map(_is_list, typing.get_args(kind)))
    return typing.get_origin(kind) in (tuple, list, frozenset)


def _plain(message: str, setting: Setting) -> str:
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


_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """`2GiB`, `2g` and `2147483648` are the same number of bytes; `2GB` is 2 * 10**9. Raises ValueError."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError("must be a size such as 2GiB, 512MiB or a number of bytes")
    number, letter, binary = found.groups()
    decimal = not binary and letter and text.strip()[-1] in "bB"
    return int(float(number) * (1000 if decimal else 1024) ** " kmgt".index(letter.lower() or " "))


def format_size(num_bytes: int) -> str:
    """The shortest exact spelling that `parse_size` reads."""
    for unit, exponent in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if num_bytes and num_bytes % 1024**exponent == 0:
            return f"{num_bytes // 1024**exponent}{unit}"
    return str(num_bytes)


def process_environ() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def child_environ(
    config: Config,
    model: str,
    vllm_args: Sequence[str],
    *,
    on_gpu: bool,
    num_workers: int = 1,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """The whole environment of a gateway or worker process that inherits `environ`.

    vLLM has settings that exist only as environment variables; those that a user has set stay as they are.
    """
    inherited = {k: v for k, v in environ.items() if not k.startswith(PREFIX)}
    return vllm_defaults(model, vllm_args, on_gpu=on_gpu, num_workers=num_workers) | inherited | _ours(config)


def enter_environ(
    config: Config, model: str, vllm_args: Sequence[str], *, on_gpu: bool, own: Mapping[str, str] | None = None
) -> None:
    """Give this very process what `child_environ` gives a child. Call it before vllm is imported.

    `own` is what this kind of process must have, whatever the user has set.
    """
    for name, value in vllm_defaults(model, vllm_args, on_gpu=on_gpu, num_workers=1).items():
        os.environ.setdefault(name, value)
    os.environ.update(own or {})
    os.environ.update(_ours(config))


def _ours(config: Config) -> dict[str, str]:
    return as_environ(config) | {ARENA_DIR: config.arena.directory}


def vllm_defaults(model: str, vllm_args: Sequence[str], *, on_gpu: bool, num_workers: int) -> dict[str, str]:
    """What we set for vLLM where the user has not."""
    found = {"VLLM_NO_USAGE_STATS": "1"}
    if Path(model).is_dir():
        found["HF_HUB_OFFLINE"] = "1"  # nothing to fetch, and every look-up would wait for the network
    if on_gpu:
        return found
    # vLLM's own default is most of the machine's memory for each worker. The variable would beat the flag.
    if not any(arg.replace("_", "-").startswith("--kv-cache-memory-bytes") for arg in vllm_args):
        found["VLLM_CPU_KVCACHE_SPACE"] = str(_kv_cache_gib(num_workers))
    return found


def _kv_cache_gib(num_workers: int) -> int:
    """An eighth of the memory for all workers together, 1 to 4 GiB for each."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    return max(1, min(4, total // (8 * num_workers)))
