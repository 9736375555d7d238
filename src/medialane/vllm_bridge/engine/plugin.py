"""What medialane does in vLLM's processes before an engine starts there: `register`, `PrivateFolder`, and what is
imported before a fork.

`register` is the entry point of the group `vllm.general_plugins`: vLLM calls it in each of its processes.

Only engines of medialane are changed: plain vLLM in the same environment calls this function, too.

In a process that runs, or is about to fork, an EngineCore (whose module is loaded before plugins are), it adds the
decoding of arena descriptors. In processes that wait for each other through shared memory (also recognised by a loaded
module), it replaces the busy wait. Elsewhere it costs a few lookups.

A `PrivateFolder` is for the sockets of one engine, and reaped after a kill. vLLM creates its own sockets, and the file
through which its processes meet, in the folder for temporary files, and leaves files of killed processes there. `enter`
makes it create them in ours instead, together with the files of its KV events. vLLM's processes inherit the variable,
so it also shows which of them are ours (`is_entered`).

What vLLM needs of a process that others are forked from, and of its forks: modules that vLLM's front end and EngineCore
import when they start, rather than when vLLM is imported, the number of threads of torch, and the level of its loggers.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import parent_process
from pathlib import Path

import torch
from vllm import envs

from medialane.observability.logging import configure_child
from medialane.runtime.linux import hide_memory, show_memory
from medialane.runtime.private_files import OwnedFolder

logger = logging.getLogger(__name__)


def show_vllm_lines(level: str | None = None) -> None:
    """Have vLLM's lines of at least `level`, by default VLLM_LOGGING_LEVEL, written in this process, through
    our handler (`observability.logging`)."""
    if not envs.VLLM_CONFIGURE_LOGGING:  # else vLLM has set it
        logging.getLogger("vllm").setLevel(level or envs.VLLM_LOGGING_LEVEL)


def register() -> None:
    """Install the arena decoder in EngineCore, and the CPU-friendly wait, where they apply. Idempotent."""
    if not is_entered():
        return
    if parent_process() is not None:  # one that vLLM has started
        _hide_memory()
        configure_child()
        show_vllm_lines()
    if "vllm.v1.engine.core" in sys.modules:
        from medialane.vllm_bridge.engine.engine_core import install

        install()
    if "vllm.distributed.utils" in sys.modules:
        from medialane.vllm_bridge.seams.cpu import shorten_waits

        shorten_waits()


def _hide_memory() -> None:
    """As in the worker; but on GPUs the processes of one engine take each other's memory by pidfd_getfd(2), as trainers
    on the same host do, and the kernel allows that only if memory may be read."""
    from vllm.platforms import current_platform  # imported lazily: plain vLLM has it, too, but need not at this point

    if current_platform.is_cpu():
        hide_memory()
    else:
        show_memory()


_PREFIX = "medialane-vllm-"

#: The folder in which vLLM creates its sockets.
_VARIABLE = "VLLM_RPC_BASE_PATH"

#: sockaddr_un.sun_path has 108 bytes with its terminating zero (unix(7)); vLLM's sockets are named by a UUID.
_MAX_PARENT_BYTES = 107 - len(f"/{_PREFIX}12345678/") - 36


def is_entered() -> bool:
    """Return whether this process, or the one that started it, has entered a private folder."""
    return Path(os.environ.get(_VARIABLE, "")).name.startswith(_PREFIX)


class PrivateFolder:
    """An existing folder, mode 0700, in VLLM_RPC_BASE_PATH or else in the folder for temporary files; in /tmp if its
    path would be too long for sockets. Raises StartupFailed."""

    def __init__(self) -> None:
        self._outer = os.environ.get(_VARIABLE)
        parent = Path(self._outer or tempfile.gettempdir())
        if len(os.fsencode(parent)) > _MAX_PARENT_BYTES:
            parent = Path("/tmp")  # noqa: S108 - mkdtemp creates the folder exclusively and private
        self._folder = OwnedFolder.create(parent, _PREFIX)

    @property
    def path(self) -> Path:
        return self._folder.path

    def enter(self) -> None:
        """Make vLLM, in this process and its children, create its sockets in the folder, until `remove`."""
        os.environ[_VARIABLE] = str(self.path)

    def remove(self) -> None:
        """Restore the environment and delete the folder. Idempotent."""
        if os.environ.get(_VARIABLE) == str(self.path):
            del os.environ[_VARIABLE]
            if self._outer is not None:
                os.environ[_VARIABLE] = self._outer
        self._folder.close()


#: None starts a thread or uses a device. `tests/contract/test_vllm_warm_imports.py` checks it.
_MODULES = (
    "medialane.vllm_bridge.seams.cpu",
    "vllm.renderers.hf",
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.triton_utils.dispatcher",
    "vllm.utils.cpu_triton_utils",
    "vllm.v1.pool.flash_maxsim",
    "vllm.transformers_utils.chat_templates",
    "transformers.tokenization_mistral_common",
    "einops._torch_specific",
)
_OF_CPU = ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn")
_OF_GPU = ("vllm.v1.worker.gpu_worker",)

_NUM_THREADS = torch.get_num_threads()


def warm_imports() -> None:
    """Import what engines and front ends import when they start. A module that is missing, or cannot be imported on
    this machine, is left to the process that needs it."""
    from vllm.platforms import current_platform  # imported lazily, as above

    for name in (*_MODULES, *(_OF_CPU if current_platform.is_cpu() else _OF_GPU)):
        try:
            importlib.import_module(name)
        except ImportError as error:
            logger.info("%s is not imported ahead: %s", name, error)


def set_num_threads(environ: Mapping[str, str]) -> None:
    """Use as many threads for torch's CPU operations as a process that is started with `environ`: OpenMP reads its
    variable when it is loaded. Starts none."""
    number = environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(number) if number.isdecimal() and int(number) else _NUM_THREADS)
