"""Entry point of the group `vllm.general_plugins`: vLLM calls `register` in each of its processes.

Only engines of medialane are changed: plain vLLM in the same environment calls this function, too.

In a process that runs, or is about to fork, an EngineCore (whose module is loaded before plugins are), it adds the
decoding of arena descriptors. In processes that wait for each other through shared memory (also recognised by a loaded
module), it replaces the busy wait. Elsewhere it costs a few lookups.
"""

from __future__ import annotations

import sys
from multiprocessing import parent_process

from medialane.observability.logging import configure_child
from medialane.runtime.linux import hide_memory, show_memory
from medialane.vllm_bridge.engine.private_folder import is_entered
from medialane.vllm_bridge.log_level import show_vllm_lines


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
        from medialane.vllm_bridge.engine import cpu_waiting

        cpu_waiting.install()


def _hide_memory() -> None:
    """As in the worker; but on GPUs the processes of one engine take each other's memory by pidfd_getfd(2), as trainers
    on the same host do, and the kernel allows that only if memory may be read."""
    from vllm.platforms import current_platform  # imported lazily: plain vLLM has it, too, but need not at this point

    if current_platform.is_cpu():
        hide_memory()
    else:
        show_memory()
