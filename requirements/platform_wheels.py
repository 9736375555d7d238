"""Drops the hashes of pure wheels from a lock where each supported machine has a platform wheel: part of `make lock`.

Usage: python requirements/platform_wheels.py requirements/FILE.txt < PYLOCK

PYLOCK is the same lock as pylock.toml, with the names of files.

A pure wheel beside platform wheels is the fallback of other machines: soundfile's has no libsndfile, those of aiohttp,
protobuf and mypy are slower. Here it is only taken by mistake: if one index has the pure wheel and another the platform
wheel, uv takes the file of the first index. A pure wheel stays if a supported machine has no other: Linux with glibc on
x86-64 and ARM, with any of PYTHONS. Musl and other processors lose it, but have no wheels of vLLM and torch either.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

#: For which vLLM 0.32 and all that it needs have wheels; the Makefile refuses others.
PYTHONS = ("cp311", "cp312", "cp313", "cp314")
MACHINES = ("x86_64", "aarch64")


def fits(filename: str, python: str, machine: str) -> bool:
    """Whether this is the name of a platform wheel for this Python on this machine."""
    pythons, abi, platforms = filename.removesuffix(".whl").rsplit("-", 3)[-3:]
    if not re.search(rf"manylinux\w*_{machine}(\.|$)", platforms):
        return False
    if abi == "abi3":
        return any(int(tag[3:]) <= int(python[3:]) for tag in pythons.split(".") if tag.startswith("cp3"))
    if abi == "none":
        return bool({"py3", python} & set(pythons.split(".")))
    return abi == python


def needless(filenames: list[str]) -> list[str]:
    """Return the pure wheels among those of one version that no machine needs."""
    pure = [name for name in filenames if name.endswith("-none-any.whl")]
    machines = [(python, machine) for python in PYTHONS for machine in MACHINES]
    everywhere = all(any(fits(name, *each) for name in filenames) for each in machines)
    return pure if everywhere else []


def drop(lock: str, pylock: str) -> str:
    """Return the lock without the hashes of needless wheels."""
    for package in tomllib.loads(pylock)["packages"]:
        hashes = {wheel["url"].rpartition("/")[2]: wheel["hashes"]["sha256"] for wheel in package.get("wheels", [])}
        for name in needless(list(hashes)):
            lock = re.sub(rf" \\\n    --hash=sha256:{hashes[name]}\b", "", lock)
    return lock


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(drop(path.read_text(), sys.stdin.read()))
