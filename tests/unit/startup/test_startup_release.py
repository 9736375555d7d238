"""A release as its users get it: sdist, the wheel that is built from it, and that in an environment of its own, without
vLLM and torch. The version is written in one place."""

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
from test_startup_wheels import build

from medialane import __version__

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "src"

#: vLLM and what it brings cannot be imported, although they are installed next to what medialane needs.
WITHOUT_VLLM = "import sys; sys.modules.update(dict.fromkeys(('vllm', 'torch', 'transformers', 'ray', 'nixl')))"
IMPORTS = f"""{WITHOUT_VLLM}
import importlib.metadata
from importlib.resources import files
import medialane.client, medialane.types.errors, medialane.gateway, medialane.prepare, medialane.routing
import medialane.store, medialane.cli.serve, medialane.cluster.local, medialane.worker
from medialane.cluster.vllm_flags import flag_table
assert "--max-model-len" in flag_table()["flags"]
assert b"</html>" in files("medialane.gateway").joinpath("page", "index.html").read_bytes()
(plugin,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="medialane")
assert plugin.value == "medialane.vllm_bridge.engine.plugin:register"
print(medialane.__file__, importlib.metadata.version("medialane"), sep="\\n")
"""


def in_package(folder):
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the sdist, as an index or a packager would."""
    folder = tmp_path_factory.mktemp("release")
    with tarfile.open(build(ROOT, "build_sdist", folder)) as sdist:
        sdist.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return build(unpacked, "build_wheel", folder)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of a new environment with the wheel; the libraries of this one are found after it."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--no-compile", "--disable-pip-version-check", wheel], check=True, timeout=60)
    (packages,) = folder.glob("lib/python*/site-packages")
    libraries = Path(importlib.util.find_spec("msgspec").origin).parents[1]
    (packages / "libraries.pth").write_text(f"{libraries}\n")  # without its .pth files: no editable medialane
    return folder


def run(*words, cwd):
    """Outside of the repository, with nothing of it on the path. Return the output."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MEDIALANE_"))}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


pytestmark = pytest.mark.timeout(120)


@pytest.mark.whole
def test_wheel_of_the_sdist_has_every_file_of_the_package_and_nothing_else(wheel):
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == in_package(SOURCES)
    needed = {"cluster/vllm_flags.json", "gateway/page/index.html", "gateway/page/page.js", "py.typed"}
    assert {f"medialane/{name}" for name in needed} <= names
    assert not [name for name in names if re.search(r"(^|/)(tests?|conftest)(/|\.py|_)|\.pyc$", name)]


@pytest.mark.whole
def test_installed_wheel_runs_without_vllm_and_torch(installed, tmp_path):
    python, medialane = installed / "bin" / "python", installed / "bin" / "medialane"
    assert run(medialane, "--version", cwd=tmp_path).strip() == f"medialane {__version__}"
    assert "serve" in run(medialane, "--help", cwd=tmp_path)
    assert "--arena-size" in run(medialane, "serve", "--help", cwd=tmp_path)
    place, version = run(python, "-c", IMPORTS, cwd=tmp_path).splitlines()[-2:]
    assert Path(place).is_relative_to(installed)
    assert version == __version__
    run(medialane, "certs", "made", "--host", "localhost", cwd=tmp_path)
    assert list((tmp_path / "made").rglob("*.pem"))


def test_version_is_written_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    place = ROOT / project["tool"]["hatch"]["version"]["path"]
    literal = re.compile(rf"[\"']{re.escape(__version__)}[\"']")
    assert [path for path in SOURCES.rglob("*.py") if literal.search(path.read_text())] == [place]
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", __version__)
    assert f"## [{__version__}]" in (text := (ROOT / "CHANGELOG.md").read_text()) or "## [Unreleased]" in text
