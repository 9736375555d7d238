"""The environment of this process and of its children: our settings, vLLM's, and what each role inherits.

A process gets the variables of its role and no others: what it does not have, it cannot leak. Variables are allowed by
name or by pattern (`VLLM_*`). A name that looks like a secret's (`VLLM_API_KEY`) is not allowed by a pattern, except by
one of the operator (`--pass-env`); preparers and the NIXL mover, which handle hostile bytes, never get one.

It must be absent from the start of a process: what the kernel has put on its stack stays there, and so do copies on the
heap, whatever is removed from `os.environ` later.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Literal

import msgspec

from medialane.config.loading import load_config
from medialane.config.settings import PREFIX, Config, SectionName, settings
from medialane.observability.logging import VARIABLE as LOG_PROCESS
from medialane.runtime.heartbeat import VARIABLE as HEARTBEAT
from medialane.runtime.phase import SYSTEMD_VARIABLES
from medialane.runtime.phase import VARIABLE as PHASE_FILE

logger = logging.getLogger(__name__)

RoleName = Literal["warm", "store", "worker", "gateway", "name router", "preparer", "mover"]

_SECRET: Final = re.compile(
    r".*(SECRET|PASSWORD|PASSWD|CREDENTIAL).*|(.*_)?(API)?(KEY|KEYS|TOKEN|AUTH|PASS|PWD|HEADERS|COOKIE)", re.IGNORECASE
)

_PROCESS: Final = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "TZDIR", "TERM",
    "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TMPDIR", "TMP", "TEMP", "XDG_*", "PYTHON*", "VIRTUAL_ENV",
    "CONDA_*", "LD_*", "MALLOC_*", "GLIBC_TUNABLES", "TCMALLOC_*", "OMP_*", "KMP_*", "GOMP_*", "MKL_*", "OPENBLAS_*",
    "BLIS_*", "NUMEXPR_*", "NUMBA_*", "DNNL_*", "ONEDNN_*", "OPENCV_*", "RAYON_*", "DO_NOT_TRACK",
)  # fmt: skip
_DEVICES: Final = (
    "CUDA_*", "CUDA*_HOME", "CUBLAS*", "CUDNN_*", "NVIDIA_*", "NCCL_*", "NVSHMEM_*", "UCX_*", "NIXL_*", "RDMAV_*",
    "IBV_*", "MLX*_*", "ROCM_*", "ROCR_*", "HIP_*", "HSA_*", "AMD_*", "GPU_*", "ONEAPI_*", "ZE_*", "SYCL_*", "CCL_*",
    "XPU_*", "TPU_*", "XLA_*",
)  # fmt: skip
#: Of vLLM, and of the libraries that load and process models.
_MODELS: Final = (
    "VLLM_*", "HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "MODELSCOPE_*", "TOKENIZERS_*", "TIKTOKEN_*", "SAFETENSORS_*",
    "TORCH*", "PYTORCH_*", "ATEN_*", "TRITON_*", "FLASHINFER_*", "FLASH_ATTENTION_*", "FLA_*", "AITER_*", "IPEX_*",
    "DG_*", "EP_*", "KINETO_*",
    "OUTLINES_*", "XGRAMMAR_*", "LLGUIDANCE_*", "TQDM_*", "MAX_JOBS", "NVCC_*", "CC", "CXX", "CPATH", "LIBRARY_PATH",
    "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH",
)  # fmt: skip
#: For downloads from a model hub. A proxy's address may contain a password.
_HUB: Final = (
    "HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "MODELSCOPE_API_TOKEN",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "RUNAI_STREAMER_*",
    *(f"{scheme}_proxy" for scheme in ("http", "https", "all", "no")),
    *(f"{scheme}_PROXY" for scheme in ("HTTP", "HTTPS", "ALL", "NO")),
)  # fmt: skip
_TELEMETRY: Final = (
    "PROMETHEUS_*", "OTEL_*", "OTEL_EXPORTER_OTLP_HEADERS",
    *(f"OTEL_EXPORTER_OTLP_{signal}_HEADERS" for signal in ("TRACES", "METRICS", "LOGS")),
)  # fmt: skip
#: Of engines of several processes and hosts.
_CLUSTER: Final = (
    "GLOO_*", "TP_*", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RAY_*",
    "LMCACHE_*", "MOONCAKE_*",
)  # fmt: skip


@dataclass(frozen=True)
class RoleEnviron:
    """What one kind of process gets: the `variables`, and the secret settings of the sections `secrets`. One that is
    `exposed` to hostile bytes gets nothing that looks like a secret. `fixed` are values that it has in any case."""

    variables: tuple[str, ...]
    secrets: frozenset[SectionName] = frozenset()
    exposed: bool = False
    fixed: tuple[tuple[str, str], ...] = ()


#: Keeps the hub's library from reading the token that `hf auth login` has left in a file.
_NO_TOKEN: Final = (("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"), ("HF_TOKEN_PATH", os.devnull))


#: Not read while anything is imported: variables of the groups above in which processes of one host may differ.
_READ_LATER: Final = (
    "VLLM_API_KEY", "VLLM_CPU_*", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM",
    "OMP_NUM_THREADS",  # set by call in a fork (`vllm_bridge.engine.plugin`)
)  # fmt: skip

ROLES: Final[Mapping[RoleName, RoleEnviron]] = {
    "warm": RoleEnviron(
        (*_PROCESS, *_DEVICES, *_MODELS),
        exposed=True,
        # OpenBLAS starts threads when it is loaded, tokenizers at the first text; threads are not forked.
        fixed=(("OPENBLAS_NUM_THREADS", "1"), ("TOKENIZERS_PARALLELISM", "false")),
    ),
    "store": RoleEnviron((*_PROCESS, *_DEVICES, *_MODELS, *_HUB, *_TELEMETRY), frozenset({"rpc"})),
    "worker": RoleEnviron((*_PROCESS, *_DEVICES, *_MODELS, *_HUB, *_TELEMETRY, *_CLUSTER), frozenset({"rpc"})),
    "gateway": RoleEnviron(
        (*_PROCESS, *_DEVICES, *_MODELS, *_HUB, *_TELEMETRY, "VLLM_API_KEY"), frozenset({"rpc", "gateway"})
    ),
    "name router": RoleEnviron((*_PROCESS, "VLLM_API_KEY", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"), frozenset({"gateway"})),
    "preparer": RoleEnviron((*_PROCESS, *_DEVICES, *_MODELS, PHASE_FILE, LOG_PROCESS), exposed=True, fixed=_NO_TOKEN),
    "mover": RoleEnviron((*_PROCESS, *_DEVICES, LOG_PROCESS), exposed=True),
}


def as_environ(config: Config, *, secrets: Collection[SectionName] | None = None) -> dict[str, str]:
    """Return the environment variables from which another process loads an equal configuration: without defaults, and
    of the secret settings only the sections `secrets`, if given.

    A process's environment is readable only by its user, unlike its command line: secrets may be passed this way.
    """
    variables = {}
    for setting in settings():
        value = getattr(getattr(config, setting.section), setting.field)
        if setting.is_secret and secrets is not None and setting.section not in secrets:
            continue
        if value != setting.default:
            variables[setting.variable] = value if isinstance(value, str) else json.dumps(msgspec.to_builtins(value))
    return variables


def settings_environ(config: Config) -> dict[str, str]:
    """Return `as_environ` for another host: without secrets, which must be in the environment there."""
    return as_environ(config, secrets=())


def host_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a supervisor inherits on a host with the environment `environ`: of our variables, only secrets."""
    secrets = {setting.variable for setting in settings() if setting.is_secret}
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX) or name in secrets}


def foreign_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a program that is not ours inherits: none of our variables."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX)}


def worker_environ(environ: Mapping[str, str], settings_of_worker: Mapping[str, str]) -> dict[str, str]:
    """Return what a worker with these settings (`settings_environ`) inherits on a host with the environment `environ`:
    the secret settings of that host are among it."""
    config = load_config(environ=settings_of_worker)
    secrets = {
        setting.variable for setting in settings() if setting.is_secret and setting.section in ROLES["worker"].secrets
    }
    held = {name: value for name, value in environ.items() if name in secrets}
    return allowed_environ("worker", environ, config.environment.pass_env) | held


def process_environ() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def replace_environ(variables: Mapping[str, str]) -> None:
    """Replace the whole environment of this process, a fork that is to be another one."""
    os.environ.clear()
    os.environ.update(variables)


def set_secrets(variables: Mapping[str, str]) -> None:
    """Set variables of this process: for secrets that were given as flags, so that they are passed on like others."""
    os.environ.update(variables)


def allowed_environ(role: RoleName, environ: Mapping[str, str], pass_env: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables of `environ` that a role inherits, none of our settings, and variables that it has in any
    case. The names of omitted variables are logged (debug)."""
    own = ROLES[role]
    allowed = {name: value for name, value in environ.items() if _is_allowed(name, own, pass_env)}
    left_out = sorted(foreign_environ(environ).keys() - allowed.keys())
    logger.debug("environment variables that a %s does not get (--pass-env NAME): %s", role, ", ".join(left_out))
    return allowed | dict(own.fixed)


def changed_imports(environ: Mapping[str, str], warm: Mapping[str, str]) -> list[str]:
    """Return the variables for which a process with `environ` may not be a fork of one with the environment `warm`:
    what was imported there may depend on them."""
    role = ROLES["warm"]
    differing = {name for name in environ.keys() | warm.keys() if environ.get(name) != warm.get(name)}
    return sorted(
        name
        for name in differing
        if _is_allowed(name, role, ()) and not any(fnmatchcase(name, pattern) for pattern in _READ_LATER)
    )


def _is_allowed(name: str, role: RoleEnviron, pass_env: Iterable[str]) -> bool:
    if name.startswith(PREFIX):
        return name in role.variables
    if _SECRET.fullmatch(name) and role.exposed:
        return False
    if any(fnmatchcase(name, pattern) for pattern in pass_env):
        return True
    patterns: Iterable[str] = role.variables
    if _SECRET.fullmatch(name):
        patterns = (pattern for pattern in patterns if "*" not in pattern)
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def child_environ(
    config: Config,
    role: RoleName,
    model: str,
    vllm_args: Sequence[str],
    *,
    on_gpu: bool,
    num_workers: int = 1,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Return the whole environment of a store, worker or gateway, started by a process with `environ`.

    Some of vLLM's settings exist only as environment variables; what the user has set is not changed.
    """
    return {
        **vllm_defaults(model, vllm_args, on_gpu=on_gpu, num_workers=num_workers),
        **_vllm_logging(vllm_args, environ),
        **allowed_environ(role, environ, config.environment.pass_env),
        **as_environ(config, secrets=ROLES[role].secrets),
    }


def enter_environ(
    config: Config,
    role: RoleName | None,
    model: str,
    vllm_args: Sequence[str],
    *,
    on_gpu: bool,
    own: Mapping[str, str] | None = None,
) -> None:
    """Reduce this process's environment, which its children inherit, to its role's (None: all of it), without
    our settings, which are in `config`; and set vLLM's defaults. Call it before vllm is imported.

    `own` are variables that this kind of process requires, whatever the user has set.
    """
    if role is not None:
        kept = allowed_environ(role, os.environ, config.environment.pass_env)
        for name in os.environ.keys() - {*kept, HEARTBEAT, PHASE_FILE, *SYSTEMD_VARIABLES}:
            del os.environ[name]
    defaults = vllm_defaults(model, vllm_args, on_gpu=on_gpu, num_workers=1)
    for name, value in (defaults | _vllm_logging(vllm_args, os.environ)).items():
        os.environ.setdefault(name, value)
    os.environ.update(own or {})


def vllm_defaults(model: str, vllm_args: Sequence[str], *, on_gpu: bool, num_workers: int) -> dict[str, str]:
    """Return our defaults of vLLM's environment variables."""
    defaults = {"VLLM_NO_USAGE_STATS": "1"}
    if Path(model).is_dir():
        defaults["HF_HUB_OFFLINE"] = "1"  # nothing to fetch, and every lookup would wait for the network
    if on_gpu:
        return defaults
    # vLLM's default is most of the machine's memory for each worker. The variable would override the flag.
    if not any(arg.replace("_", "-").startswith("--kv-cache-memory-bytes") for arg in vllm_args):
        defaults["VLLM_CPU_KVCACHE_SPACE"] = str(_kv_cache_gib(num_workers))
    return defaults


def _vllm_logging(vllm_args: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return what keeps vLLM from installing a handler of its own, so that its lines are written as ours, unless the
    operator has configured its logging."""
    flags = (arg.replace("_", "-") for arg in vllm_args)
    if "VLLM_LOGGING_CONFIG_PATH" in environ or any(f.startswith(("--logging-config", "--log-config")) for f in flags):
        return {}
    return {"VLLM_CONFIGURE_LOGGING": "0"}


def _kv_cache_gib(num_workers: int) -> int:
    """Return an eighth of the memory divided by the number of workers, between 1 and 4 GiB."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    return max(1, min(4, total // (8 * num_workers)))
