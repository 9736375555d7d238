"""Entry point of the group `vllm.general_plugins`: vLLM calls `register` in each of its processes.

Only a process that runs, or is about to fork, an EngineCore has something to change; that module is loaded there before
plugins are. Everywhere else this costs one look at `sys.modules`.
"""

from __future__ import annotations

import sys


def register() -> None:
    """Teach this process's EngineCore to read tensors out of arenas. Idempotent."""
    if "vllm.v1.engine.core" in sys.modules:
        from medialane.vllm_bridge.engine_core import install

        install()
