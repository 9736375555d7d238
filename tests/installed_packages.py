"""Installed distributions, as packages of their names report them."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest


def is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, number: str) -> Path:
    """Install a distribution without files for one test, before one of the same name; return the folder of its
    metadata."""
    metadata = folder / f"{name.replace('-', '_')}-{number}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    monkeypatch.syspath_prepend(str(folder))
    return metadata
