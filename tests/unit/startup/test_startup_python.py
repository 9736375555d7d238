"""The Python of .venv: one that cannot make it, or has no wheels, is refused before any download, and the message says
what to do; a .venv that cannot be used is made again."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def project(tmp_path):
    """A folder in which `make venv` has no .venv yet."""
    for name in ("Makefile", "requirements", "pyproject.toml", "packages"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.fixture
def python(tmp_path):
    """Makes a Python that runs this code when it starts; without ensurepip, so that no run gets to downloads."""

    def make(code=""):
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(f"import sys\nsys.modules['ensurepip'] = None\n{code}")
        path = tmp_path / "python3"
        path.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} "$@"\n')
        path.chmod(0o755)
        return path

    return make


def said(project, python):
    words = ["make", "venv", "EXTRA=cpu", f"PYTHON={python}"]
    # As a person's shell has them: `make test` hands its own flags and level down to a make that a test starts.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    done = subprocess.run(words, cwd=project, env=environ, capture_output=True, text=True, check=False, timeout=15)
    assert done.returncode == 2
    *_, last, end = (done.stdout + done.stderr).splitlines()
    assert end.startswith("make: ***")
    return last


NO_VENV = "has no ensurepip, which makes .venv: apt-get install python3-venv (Debian, Ubuntu)"


def test_without_ensurepip_the_package_is_named(project, python):
    assert said(project, python()).endswith(NO_VENV)
    assert not (project / ".venv").exists()


@pytest.mark.parametrize("version", ["(3, 10, 9)", "(3, 15, 0)"])
def test_versions_without_wheels_are_refused(project, python, version):
    last = said(project, python(f"sys.version_info = {version}"))
    assert last.startswith("medialane: Python 3.11 to 3.14 is needed, ")
    assert last.endswith("make demo PYTHON=python3.13")


def test_without_python_the_packages_are_named(project):
    assert said(project, "no-such-python") == (
        "medialane: no no-such-python here: install python3 and python3-venv, or name a Python of 3.11 to 3.14 with "
        "PYTHON="
    )


def test_environment_without_pip_is_made_again(project, python):
    """A `venv` that fails for want of ensurepip leaves one behind."""
    venv.create(project / ".venv", symlinks=True)
    assert said(project, python()).endswith(NO_VENV)


def test_environment_of_another_python_than_the_named_one_is_made_again(project, python):
    venv.create(project / ".venv", symlinks=True)
    (packages,) = (project / ".venv" / "lib").glob("python3.*/site-packages")
    (packages / "pip.py").touch()
    other = python()
    answer = '[ "$1" != -V ] || { echo Python 3.12.0; exit; }'
    other.write_text(other.read_text().replace("PYTHONPATH", f"{answer}\nPYTHONPATH"))
    assert said(project, other).endswith(NO_VENV)
