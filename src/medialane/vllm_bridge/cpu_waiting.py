"""How vLLM's processes wait for each other on a machine without a GPU.

EngineCore and its worker exchange steps through shared memory and spin in `sched_yield` until the other one is done.
Such spinners on two cores can keep every other process off the CPU for seconds: with Linux 6.18, two cores and one
stream of 6000 tokens the gateway waited up to 5 s for a core, and workers took it for dead. Sleeping for no time
instead lets the others run (0.2 s at most in the same run) and costs the engine about 50 us a wait.

On GPU hosts, where cores are many and steps are short, vLLM's choice stays. The seam is private to vLLM 0.32;
`tests/contract/test_vllm_cpu_waiting.py` pins it.
"""

from __future__ import annotations

import vllm.distributed.utils as waiting
from vllm.platforms import current_platform


def install() -> None:
    """Let this process's waits leave the CPU to others, if it computes on the CPU. Idempotent."""
    if current_platform.is_cpu():
        waiting.USE_SCHED_YIELD = False
