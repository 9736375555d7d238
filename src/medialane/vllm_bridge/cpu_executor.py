"""vLLM's model in the EngineCore process itself, on a machine without a GPU.

vLLM 0.32 does so on GPUs (`UniProcExecutor`), but gives a CPU engine a process of its own for the model, since it sets
OpenMP up by environment variables, which a process reads when it loads the library (`platforms/cpu.py`). EngineCore and
that process then exchange every step through shared memory, and whoever waits spins: two cores are busy for one model,
and each step pays for two hand-overs. Here the threads are set up by calls instead, and a step is a function call.

The cores are those that vLLM would choose (`OMPProcessManager`, which honours VLLM_CPU_OMP_THREADS_BIND): all but the
one that it leaves to the processes beside the model.
"""

from __future__ import annotations

import os

import torch

from medialane.vllm_bridge.seams.cpu import OneProcessExecutor, cores_of_ranks

QUALIFIED_NAME = f"{__name__}.CpuExecutor"


class CpuExecutor(OneProcessExecutor):
    """Runs the model on the thread that schedules, with vLLM's own choice of cores."""

    def before_load(self) -> None:
        _set_threads(cores_of_ranks(self.vllm_config))


def _set_threads(cpu_lists: list[list[int]]) -> None:
    """As many OpenMP threads as there are cores in the only list, and on those; nothing where binding is off."""
    if not cpu_lists:
        return
    (cores,) = cpu_lists
    torch.set_num_threads(len(cores))
    # OpenMP's threads are made by this one and stay where it may run. EngineCore's other threads exist already, and a
    # single thread is best where the kernel finds room for it.
    if len(cores) > 1:
        os.sched_setaffinity(0, cores)
