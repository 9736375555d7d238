"""Several models on one host: a store, workers and gateways for each, and the name router in front of them."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import msgspec

from medialane.cluster import local
from medialane.cluster.child_process import HttpAnswers, ProcessSpec
from medialane.cluster.placement import Hardware, num_gpus
from medialane.cluster.vllm_flags import TLS_FLAGS, flag_values, has_flag, take_secrets, with_config_file, without_flags
from medialane.config import Config, ModelTable, Setting, TableRules, allowed_environ, as_environ, settings
from medialane.gateway import ServedModel
from medialane.runtime.private_files import write_private
from medialane.types.errors import StartupFailed

#: Members of a model's table besides settings.
_OWN_MEMBERS = ("model", "flags", "gpus")
_NOT_FOR_ROUTER = "--enable-ssl-refresh"
_ROUTER_STOP_S = 10.0

#: Settings that concern the processes of one model, in a section whose other settings do not.
_OF_ONE_MODEL = frozenset({
    "workers", "encoders", "encoder-gpu-share", "gateways", "single-gpu", "warm-start", "stop-timeout",
})  # fmt: skip
#: All gateways have the same keys, and the name router's limits.
_OF_ALL_MODELS = frozenset({
    "keys", "require-api-key", "admin-key-file", "metrics-key-file", "page", "gateway-max-header-bytes",
    "gateway-header-timeout", "gateway-max-connections", "render-only", "drain-timeout",
})  # fmt: skip
#: Ports: each model needs its own.
_PORTS: dict[str, Callable[[Config], str | int]] = {
    "join-listen": lambda config: config.gateway.join_listen,
    "peer-listen": lambda config: config.store.peer_listen,
    "metrics-port": lambda config: config.worker.metrics_port,
}


@dataclass(frozen=True)
class ModelGroup:
    """One model with its flags. `name` is its table's, by which requests ask for it unless the flags say otherwise;
    `gpus` are the table's, if it names any."""

    name: str
    model: str
    vllm_args: tuple[str, ...]
    config: Config
    gpus: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name as a part of the names of processes and files."""
        return re.sub(r"[^\w.-]+", "-", self.name)

    @property
    def served_names(self) -> tuple[str, ...]:
        return tuple(flag_values(self.vllm_args, "--served-model-name")) or (self.name,)


def _is_shared(setting: Setting) -> bool:
    """Return whether a setting applies to all models, so that the table of one must not have it."""
    if setting.section == "cluster":
        return setting.name not in _OF_ONE_MODEL
    return setting.section in ("server", "logging") or setting.name in _OF_ALL_MODELS


#: Of the tables of a file.
TABLES = TableRules(_OWN_MEMBERS, tuple(setting.name for setting in settings() if _is_shared(setting)))


def group_of(table: ModelTable, vllm_args: Sequence[str]) -> ModelGroup:
    """Return the group of a table; `vllm_args` are the flags of all models. Raises StartupFailed."""
    where, own = f"models.{table.name}", table.own
    model, flags, gpus = own.get("model", table.name), own.get("flags", []), own.get("gpus", [])
    if not isinstance(model, str) or not model:
        raise StartupFailed(f"{where}: model must be a folder, or a name on a model hub")
    words = with_config_file(_words(flags, f"{where}: flags"))
    if take_secrets(words)[1]:
        raise StartupFailed(f"{where}: flags: keys and tokens are shared by all models: set them in the environment")
    if tls := next((flag for flag in (*TLS_FLAGS, _NOT_FOR_ROUTER) if has_flag(words, flag)), None):
        raise StartupFailed(f"{where}: flags: {tls} is for all models: give it after `--`")
    args = [*without_flags(vllm_args, TLS_FLAGS), *words]
    if not flag_values(args, "--served-model-name"):
        args += ["--served-model-name", table.name]
    return ModelGroup(table.name, model, tuple(args), table.config, tuple(_gpus(gpus, f"{where}: gpus")))


def _words(value: Any, where: str) -> list[str]:
    if isinstance(value, str):
        return shlex.split(value)
    if isinstance(value, list) and all(isinstance(word, str | int | float) for word in value):
        return [str(word) for word in value]
    raise StartupFailed(f'{where} must be a list of words, or a text: ["--max-model-len", 8192]')


def _gpus(value: Any, where: str) -> list[str]:
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    if isinstance(value, list):
        return [str(name) for name in value]
    raise StartupFailed(f"{where} must be a list of GPUs: [0, 1]")


def check_groups(groups: Sequence[ModelGroup], vllm_args: Sequence[str], environ: Mapping[str, str]) -> None:
    """Detect errors that would otherwise only appear after a minute. Raises StartupFailed."""
    if has_flag(vllm_args, _NOT_FOR_ROUTER):
        raise StartupFailed(f"{_NOT_FOR_ROUTER} is not supported for several models: restart the name router")
    _check_different([name for group in groups for name in (*group.served_names, *adapters(group))], "model or adapter")
    _check_different([group.label for group in groups], "table")
    for setting, port_of in _PORTS.items():
        _check_different([str(port) for group in groups if (port := port_of(group.config))], f"--{setting}")
    _check_arenas(groups)
    for group in groups:
        try:
            local.check(group.config, group.model, group.vllm_args, environ)
        except StartupFailed as error:
            raise StartupFailed(f"models.{group.name}: {error.message}") from error


def _check_arenas(groups: Sequence[ModelGroup]) -> None:
    """Raise StartupFailed unless all of them fit together; each fits alone."""
    arenas = [group.config.arena for group in groups]
    for directory in dict.fromkeys(each.directory for each in arenas):
        same = [each for each in arenas if each.directory == directory]
        total = msgspec.structs.replace(same[0], size_bytes=sum(each.size_bytes for each in same))
        try:
            total.validate()
        except StartupFailed as error:
            raise StartupFailed(f"all models together: {error.message}") from error


def _check_different(values: Sequence[str], what: str) -> None:
    twice = [value for value, number in Counter(values).items() if number > 1]
    if twice:
        raise StartupFailed(f"several models have the same {what}, {twice[0]}: each needs one of its own")


def adapters(group: ModelGroup) -> tuple[str, ...]:
    """Return the names of the adapters that its gateways load when they start."""
    return tuple(filter(None, map(_adapter, flag_values(group.vllm_args, "--lora-modules"))))


def _adapter(word: str) -> str:
    """Return the name in `NAME=PATH` or {"name": ...}; empty for what vLLM will refuse."""
    if not word.startswith("{"):
        return word.partition("=")[0]
    try:
        return str(json.loads(word)["name"])
    except (ValueError, KeyError):
        return ""


def process_specs(
    groups: Sequence[ModelGroup], config: Config, vllm_args: Sequence[str], run: local.HostRun
) -> list[ProcessSpec]:
    """Return the specifications of all processes; `config` and `vllm_args` apply to all models. Raises
    StartupFailed."""
    engines = [local.engines_of(group.config) for group in groups]
    num_engines = sum(each.total for each in engines)
    specs, served = [], []
    for number, (group, gpus) in enumerate(zip(groups, split_gpus(groups, run.hardware), strict=True)):
        own = run._replace(
            folder=run.folder / str(number),
            hardware=replace(run.hardware, gpus=gpus),
            listener=None,
            label=group.label,
            num_other_engines=num_engines - engines[number].total,
        )
        own.folder.mkdir(mode=0o700)
        specs += local.process_specs(group.config, group.model, group.vllm_args, own)
        sockets = local.http_sockets(group.config, own)
        served.append(ServedModel(group.name, group.served_names, tuple(map(str, sockets)), adapters(group)))
    largest = max(group.config.media.max_body_bytes for group in groups)
    config = msgspec.structs.replace(config, media=msgspec.structs.replace(config.media, max_body_bytes=largest))
    return [*specs, _router(config, vllm_args, served, run)]


def split_gpus(groups: Sequence[ModelGroup], hardware: Hardware) -> list[tuple[str, ...]]:
    """Return the GPUs of each model: named by its table, or the next ones that no table names. Raises
    StartupFailed."""
    if not hardware.gpus:
        return [()] * len(groups)
    named = {gpu for group in groups for gpu in group.gpus}
    free = [gpu for gpu in hardware.gpus if gpu not in named]
    needed = [
        0
        if group.gpus
        else num_gpus(group.vllm_args, local.engines_of(group.config), single_gpu=group.config.cluster.single_gpu)
        for group in groups
    ]
    if sum(needed) > len(free):
        wanted = ", ".join(f"{group.name} {number}" for group, number in zip(groups, needed, strict=True) if number)
        raise StartupFailed(
            f"the models need {sum(needed)} GPUs ({wanted}), {len(free)} are free: use fewer workers, or give several "
            "models the same GPUs (gpus = [0]), with a part of its memory each (--gpu-memory-utilization)"
        )
    starts = [0, *accumulate(needed)]
    return [group.gpus or tuple(free[starts[i] : starts[i + 1]]) for i, group in enumerate(groups)]


def _router(config: Config, vllm_args: Sequence[str], served: Sequence[ServedModel], run: local.HostRun) -> ProcessSpec:
    """It stops after the gateways, whose answers it passes on."""
    file = run.folder / "models.json"
    write_private(file, msgspec.json.encode(served))
    return ProcessSpec(
        name="name router",
        argv=local.command("name-router", str(file), run.flags, vllm_args),
        environ={
            **allowed_environ("name router", run.environ, config.environment.pass_env),
            **as_environ(config, secrets=frozenset({"gateway"})),
        },
        ready=HttpAnswers(f"{local.base_url(config, vllm_args)}/health", statuses=frozenset({200, 503})),
        layer=1,
        stop_timeout_s=_ROUTER_STOP_S,
        pass_fds=run.pass_fds,
        reloads=True,
    )
