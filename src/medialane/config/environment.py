"""The environment of this process and of its children: our settings, and vLLM's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from medialane.config.settings import ARENA_DIR, PREFIX, Config, settings


def as_environ(config: Config) -> dict[str, str]:
    """Return the environment variables from which another process loads an equal configuration. Defaults are left out.

    A process's environment is readable only by its user, unlike its command line: the secret may be passed this way.
    """
    found = {}
    for setting in settings():
        value = getattr(getattr(config, setting.section), setting.field)
        if value != setting.default:
            found[setting.variable] = value if isinstance(value, str) else json.dumps(msgspec.to_builtins(value))
    return found


def settings_environ(config: Config) -> dict[str, str]:
    """Return `as_environ` for another host: without secrets, which must be in the environment there."""
    secrets = _secret_variables()
    return {name: value for name, value in as_environ(config).items() if name not in secrets}


def host_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a process inherits on a host with the environment `environ`: of our variables, only secrets."""
    secrets = _secret_variables()
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX) or name in secrets}


def _secret_variables() -> set[str]:
    return {setting.variable for setting in settings() if setting.is_secret}


def process_environ() -> dict[str, str]:
    """Return a copy of this process's environment."""
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
    """Return the whole environment of a gateway or worker process that inherits `environ`.

    Some of vLLM's settings exist only as environment variables; those that the user has set are not changed.
    """
    inherited = {k: v for k, v in environ.items() if not k.startswith(PREFIX)}
    return vllm_defaults(model, vllm_args, on_gpu=on_gpu, num_workers=num_workers) | inherited | _own_environ(config)


def enter_environ(
    config: Config, model: str, vllm_args: Sequence[str], *, on_gpu: bool, own: Mapping[str, str] | None = None
) -> None:
    """Apply to this process what `child_environ` sets for a child. Call it before vllm is imported.

    `own` are variables that this kind of process requires, whatever the user has set.
    """
    for name, value in vllm_defaults(model, vllm_args, on_gpu=on_gpu, num_workers=1).items():
        os.environ.setdefault(name, value)
    os.environ.update(own or {})
    os.environ.update(_own_environ(config))


def _own_environ(config: Config) -> dict[str, str]:
    return as_environ(config) | {ARENA_DIR: config.arena.directory}


def vllm_defaults(model: str, vllm_args: Sequence[str], *, on_gpu: bool, num_workers: int) -> dict[str, str]:
    """Return our defaults of vLLM's environment variables."""
    found = {"VLLM_NO_USAGE_STATS": "1"}
    if Path(model).is_dir():
        found["HF_HUB_OFFLINE"] = "1"  # nothing to fetch, and every lookup would wait for the network
    if on_gpu:
        return found
    # vLLM's default is most of the machine's memory for each worker. The variable would override the flag.
    if not any(arg.replace("_", "-").startswith("--kv-cache-memory-bytes") for arg in vllm_args):
        found["VLLM_CPU_KVCACHE_SPACE"] = str(_kv_cache_gib(num_workers))
    return found


def _kv_cache_gib(num_workers: int) -> int:
    """Return an eighth of the memory divided by the number of workers, between 1 and 4 GiB."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    return max(1, min(4, total // (8 * num_workers)))
