"""What the wheels install: on GPUs none of our code runs in every Python process."""

import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[3]
CPU_TORCH = ROOT / "packages" / "medialane-cpu-torch"
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"


def names_in_wheel(project, folder):
    """Built by pip's build backend, without downloads."""
    pytest.importorskip("hatchling", reason="not in this environment yet: make venv")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=project, capture_output=True, text=True, check=True, timeout=15
    )
    with ZipFile(folder / done.stdout.splitlines()[-1]) as wheel:
        return wheel.namelist()


def settings(project):
    return tomllib.loads((project / "pyproject.toml").read_text())


def test_medialane_wheel_contains_only_its_package(tmp_path):
    tops = {name.split("/")[0] for name in names_in_wheel(ROOT, tmp_path)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"medialane"}


def test_hook_wheel_contains_the_hook(tmp_path):
    names = names_in_wheel(CPU_TORCH, tmp_path)
    assert {"medialane-cpu-torch.pth", "medialane_cpu_torch/__init__.py"} <= set(names)
    assert sum(name.endswith(".pth") for name in names) == 1


def test_medialane_wheel_is_configured_to_contain_only_the_package():
    assert settings(ROOT)["tool"]["hatch"]["build"]["targets"] == {"wheel": {"packages": ["src/medialane"]}}
    assert not list((ROOT / "src").rglob("*.pth"))


def test_only_the_cpu_extra_requires_the_hook():
    extras = settings(ROOT)["project"]["optional-dependencies"]
    asking = {name for name, wanted in extras.items() if any("medialane-cpu-torch" in each for each in wanted)}
    assert asking == {"cpu"}
    assert not any("medialane-cpu-torch" in each for each in settings(ROOT)["project"]["dependencies"])


@pytest.mark.parametrize(("extra", "expected"), [("cpu", True), ("vllm", False)])
def test_make_passes_the_hook_folder_to_pip(extra, expected):
    words = ["make", "--dry-run", "--always-make", f"EXTRA={extra}", "venv"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=15)
    (install,) = (line for line in done.stdout.splitlines() if " pip install " in line)
    assert f"'.[{extra},nixl,ray,dev]'" in install
    assert ("./packages/medialane-cpu-torch" in install) == expected
