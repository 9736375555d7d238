"""Makes vLLM start where torch is a CPU build and its companions are CUDA builds.

`medialane-cpu-torch.pth` imports this module in every interpreter of the environment, including the processes that
vLLM spawns. Package indexes have one build of torchvision, torchaudio and torchcodec, made for CUDA. With a CPU build
of torch

* torchvision's C++ operators do not load, and `torchvision._meta_registrations` then raises for their absence, although
  the rest, in pure Python, works (4-5 times faster than the PIL image processors): that module is replaced by an empty
  one;
* torchaudio's C++ operators do not load either, and it raises `OSError` when imported, although its resampler, which
  vLLM uses, is pure Python: the module that loads them (`torchaudio._extension`) is replaced by one that reports none,
  as in a build without them;
* torchcodec raises `OSError` when imported, while vLLM only handles `ImportError`: it is hidden by a None in
  `sys.modules`, which `import` and `importlib.util.find_spec` both treat as "not installed".

vLLM's CPU build is linked against libnuma: where the system has none, `make` puts it into the environment's lib folder,
from which it is loaded here.

Nothing else is done where torch is absent or built for a device: the cost is then one check per entry of sys.path,
10 us in total, otherwise 0.5 ms. This file is self-contained, imports nothing heavy, and never makes an interpreter
fail to start.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_DEVICES = ("cuda", "hip", "xpu")


class EmptyMetaRegistrations:
    """Meta-path finder and loader of one empty module, used only if torchvision's operators did not load."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torchvision._meta_registrations":
            return None
        extension = sys.modules.get("torchvision.extension")  # torchvision imports it first, on purpose
        if extension is None or extension._has_ops():  # noqa: SLF001 - torchvision has no public equivalent
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, EmptyMetaRegistrations)  # type: ignore[arg-type] # a class serves as well as an object

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        pass


class NoAudioOperators:
    """Meta-path finder and loader of a `torchaudio._extension` without operators."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torchaudio._extension":
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, NoAudioOperators)  # type: ignore[arg-type] # a class serves as well as an object

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        from torchaudio._internal.module_utils import fail_with_message

        module._IS_TORCHAUDIO_EXT_AVAILABLE = module._IS_ALIGN_AVAILABLE = False  # type: ignore[attr-defined]  # noqa: SLF001 - its names
        module.fail_if_no_align = fail_with_message("torchaudio's operators do not load with a CPU build of torch")  # type: ignore[attr-defined]


def torch_is_cpu_only(version_file: str) -> bool:
    """Return whether torch was built without any device, according to its `version.py`."""
    lines = [line.split("=") for line in version_file.splitlines() if "=" in line]
    facts = {left.split(":")[0].strip(): right.strip() for left, right in (line[:2] for line in lines)}
    return "__version__" in facts and all(facts.get(device, "None") == "None" for device in _DEVICES)


def needs_cuda(folder: str) -> bool:
    """Return whether the first shared object of `folder` is linked against torch's CUDA library."""
    import os

    objects = sorted(name for name in os.listdir(folder) if name.endswith(".so"))
    if not objects:
        return False
    with open(f"{folder}/{objects[0]}", "rb") as file:
        return b"libtorch_cuda.so" in file.read()


def _first(path: str) -> str | None:
    """Return the first existing `path` below `sys.path`, without importing anything; None if there is none."""
    from os.path import exists

    return next((f"{entry}/{path}" for entry in sys.path if exists(f"{entry}/{path}")), None)


def load_numa(library: str) -> None:
    """Load this file, if it exists: the dynamic linker then uses it for a library of its name."""
    from os.path import exists

    if exists(library):
        from ctypes import CDLL

        CDLL(library)


def install() -> None:
    """Apply the above in this interpreter; except for libnuma only if its torch is a CPU build."""
    load_numa(f"{sys.prefix}/lib/libnuma.so.1")
    version_path = _first("torch/version.py")
    if version_path is None:
        return
    with open(version_path) as file:
        if not torch_is_cpu_only(file.read()):
            return
    sys.meta_path.insert(0, EmptyMetaRegistrations)
    audio, codec = _first("torchaudio/lib"), _first("torchcodec/")
    if audio is not None and needs_cuda(audio):
        sys.meta_path.insert(0, NoAudioOperators)
    if codec is not None and "torchcodec" not in sys.modules and needs_cuda(codec):
        sys.modules["torchcodec"] = None  # type: ignore[assignment]


try:
    install()
except Exception as error:  # noqa: BLE001 - no error here may stop every Python process of the environment from starting
    print(f"medialane_cpu_torch: {error!r}", file=sys.stderr)  # noqa: T201 - logging is not set up this early
