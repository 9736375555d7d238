"""The start-up file in fresh interpreters, over stubs of torch and its companions."""

import _ctypes
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STARTUP = Path(__file__).parents[3] / "packages" / "medialane-cpu-torch" / "src"

CPU = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
CUDA = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
ROCM = "__version__ = '2.13.0+rocm7'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0'\n"

PROBE = """
import sys, importlib.util
sys.path[:0] = [{startup!r}, {site!r}]
import medialane_cpu_torch
for name in ("torchaudio", "torchcodec"):
    try:
        __import__(name)
        print(name, "imported", importlib.util.find_spec(name) is not None)
    except ImportError:
        print(name, "absent", importlib.util.find_spec(name) is None)
    except OSError as error:
        print(name, error)
try:
    import torchvision
    print("torchvision imported")
except RuntimeError as error:
    print("torchvision", error)
"""


LIBRARY = """
import sys
sys.prefix = {site!r}
sys.path[:0] = [{startup!r}, {site!r}]
import medialane_cpu_torch
print("/lib/libnuma.so.1" in open("/proc/self/maps").read())
"""


@pytest.fixture
def site(tmp_path):
    """A site-packages with CUDA builds beside a CPU build of torch."""
    write(tmp_path / "torch/version.py", CPU)
    write(tmp_path / "torchaudio/__init__.py", "from . import _extension")
    write(tmp_path / "torchaudio/_extension/__init__.py", "raise OSError('the real one ran')")
    write(tmp_path / "torchaudio/_internal/module_utils.py", "def fail_with_message(text):\n    return text")
    write(tmp_path / "torchaudio/lib/_torchaudio.abi3.so", "ELF libtorch_cpu.so libtorch_cuda.so")
    write(tmp_path / "torchcodec/__init__.py", "")
    write(tmp_path / "torchcodec/libtorchcodec_core4.so", "ELF libtorch_cuda.so")
    write_torchvision(tmp_path, has_ops=False)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_torchvision(site: Path, *, has_ops: bool) -> None:
    write(site / "torchvision/__init__.py", "from . import extension\nfrom torchvision import _meta_registrations")
    write(site / "torchvision/extension.py", f"def _has_ops():\n    return {has_ops}")
    write(site / "torchvision/_meta_registrations.py", "raise RuntimeError('the real one ran')")


def probe(site: Path) -> list[str]:
    code = PROBE.format(startup=str(STARTUP), site=str(site))
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, timeout=15)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_with_cpu_torch_cuda_builds_import_without_operators_and_torchcodec_is_absent(site):
    assert probe(site) == ["torchaudio imported True", "torchcodec absent True", "torchvision imported"]


def test_cpu_builds_are_left_alone(site):
    write(site / "torchaudio/lib/_torchaudio.abi3.so", "ELF libtorch_cpu.so")
    write(site / "torchcodec/libtorchcodec_core4.so", "ELF libtorch_cpu.so")
    assert probe(site)[:2] == ["torchaudio the real one ran", "torchcodec imported True"]


def test_meta_registrations_run_if_torchvision_has_its_operators(site):
    write_torchvision(site, has_ops=True)
    assert probe(site)[2] == "torchvision the real one ran"


@pytest.mark.parametrize("version", [CUDA, ROCM])
def test_nothing_is_done_with_a_device_build_of_torch(site, version):
    write(site / "torch/version.py", version)
    assert probe(site) == ["torchaudio the real one ran", "torchcodec imported True", "torchvision the real one ran"]


def test_nothing_is_done_without_torch(site):
    (site / "torch/version.py").unlink()
    assert probe(site)[2] == "torchvision the real one ran"


@pytest.mark.parametrize("there", [True, False])
def test_numa_library_of_the_environment_is_loaded(site, there):
    if there:
        (site / "lib").mkdir()
        shutil.copyfile(_ctypes.__file__, site / "lib" / "libnuma.so.1")
    code = LIBRARY.format(startup=str(STARTUP), site=str(site))
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, timeout=15)
    assert (done.stdout, done.stderr) == (f"{there}\n", "")


def test_interpreter_starts_despite_any_failure(site):
    (site / "torch/version.py").unlink()
    (site / "torch/version.py").mkdir()
    code = f"import sys; sys.path[:0] = [{str(STARTUP)!r}, {str(site)!r}]; import medialane_cpu_torch; print('started')"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, timeout=15)
    assert done.stdout == "started\n"
    assert "IsADirectoryError" in done.stderr


def test_pth_file_imports_only_the_module():
    assert (STARTUP / "medialane-cpu-torch.pth").read_text() == "import medialane_cpu_torch\n"


def test_torch_build_is_read_from_its_version_file():
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("torch is not installed")
    startup = importlib.util.spec_from_file_location("startup_copy", STARTUP / "medialane_cpu_torch" / "__init__.py")
    module = importlib.util.module_from_spec(startup)
    meta_path, modules = list(sys.meta_path), dict(sys.modules)
    try:
        startup.loader.exec_module(module)
    finally:
        sys.meta_path[:] = meta_path
        for name in set(sys.modules) - set(modules):
            del sys.modules[name]
    version = Path(spec.origin).with_name("version.py").read_text()
    assert module.torch_is_cpu_only(version) == ("+cpu" in version)
