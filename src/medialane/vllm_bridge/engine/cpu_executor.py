"""Runs the model in the EngineCore process itself, on a machine without a GPU.

vLLM 0.32 does so on GPUs (`UniProcExecutor`), but runs a CPU model in a separate process, since it configures OpenMP by
environment variables, which are read when the library is loaded (`platforms/cpu.py`). EngineCore and that process then
exchange every step through shared memory, and the waiting side spins: one model keeps two cores busy, and each step
costs two messages. Here the threads are configured by calls instead, and a step is a function call.

The cores are those that vLLM would choose (`OMPProcessManager`, which honours VLLM_CPU_OMP_THREADS_BIND): all but the
one reserved for other processes.
"""

from __future__ import annotations

import os

import torch

from medialane.vllm_bridge.seams.cpu import OneProcessExecutor, cores_of_ranks

QUALIFIED_NAME = f"{__name__}.CpuExecutor"


class CpuExecutor(OneProcessExecutor):
    """Runs the model on the scheduler's thread, with vLLM's own choice of cores."""

    def before_load(self) -> None:
        set_threads(cores_of_ranks(self.vllm_config))


def set_threads(cpu_lists: list[list[int]]) -> None:
    """Run one OpenMP thread per core of the only list, bound to these cores; no-op if binding is off."""
    if not cpu_lists:
        return
    (cores,) = cpu_lists
    torch.set_num_threads(len(cores))
    # OpenMP threads are created by this one and inherit its affinity; EngineCore's other threads already exist. A
    # single thread is best left to the kernel's scheduler.
    if len(cores) > 1:
        os.sched_setaffinity(0, cores)
