"""Entry point of the group `vllm.general_plugins`: vLLM calls `register` in each of its processes.

A process that runs, or is about to fork, an EngineCore learns to read arenas; that module is loaded there before
plugins are. Processes that spin while they wait for each other, as their loaded module tells, learn to leave the CPU to
others. Everywhere else this costs two looks at `sys.modules`.
"""

from __future__ import annotations

import sys


def register() -> None:
    """Teach this process's EngineCore to read tensors out of arenas, and patience on CPUs. Idempotent."""
    if "vllm.v1.engine.core" in sys.modules:
        from medialane.vllm_bridge.engine_core import install

        install()
    if "vllm.distributed.utils" in sys.modules:
        from medialane.vllm_bridge import cpu_waiting

        cpu_waiting.install()
