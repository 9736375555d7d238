"""vLLM's processes on a machine without a GPU; on a GPU, vLLM decides.

*The model runs in the EngineCore process itself.* vLLM 0.32 does so on GPUs (`UniProcExecutor`), but runs a CPU model
in a separate process, since it configures OpenMP by environment variables, which are read when the library is loaded
(`platforms/cpu.py`). EngineCore and that process then exchange every step through shared memory, and the waiting side
spins: one model keeps two cores busy, and each step costs two messages. Here the threads are configured by calls
instead, and a step is a function call.

The cores are the ones that vLLM would choose (`OMPProcessManager`, which honours VLLM_CPU_OMP_THREADS_BIND): all but
the one reserved for other processes.

*EngineCore is a fork of the worker.* vLLM spawns it: a new interpreter, which imports vLLM again and has pages of its
own. What that is for, OpenMP settings by environment variables, is done by calls here (`CpuExecutor`). The processes
that run a model of several ranks are spawned by EngineCore, as vLLM does: their cores are set by variables.

*Waiting between processes.* If a model runs in several processes (tensor or pipeline parallel), EngineCore exchanges
every step with them through shared memory. A reader waits in `SpinCondition`: it spins in `sched_yield` for a second
after the last message, then sleeps until the writer's notification. On two cores such spinners keep every other process
off the CPU: with Linux 6.18 and one stream of 6000 tokens the gateway waited up to 5 s for a core, and gateways
considered workers dead. Sleeping at every poll lets the others run, but halves the tokens per second, since each step
waits for timers.

So readers spin while a step is running, with an occasional short sleep that lets the kernel run waiting processes; and
they block on the notification soon after the last message, not after a second.

The seam is private to vLLM 0.32; `tests/contract/test_vllm_cpu_waiting.py` pins it. A model in one process does not
wait at all.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.ray.lazy_utils import is_in_ray_actor
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.v1.engine import utils
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from medialane.runtime.forked_ahead import ForkedContext, forked_ahead

logger = logging.getLogger(__name__)

QUALIFIED_NAME = f"{__name__}.CpuExecutor"


class CpuExecutor(UniProcExecutor):  # type: ignore[misc]  # vllm is not typed
    """Runs the model on the scheduler's thread, with vLLM's own choice of cores."""

    def _init_executor(self) -> None:
        set_threads(OMPProcessManager(self.vllm_config).cpu_lists)
        super()._init_executor()


def set_threads(cpu_lists: list[list[int]]) -> None:
    """Run one OpenMP thread per core of the only rank's list, bound to these cores; no-op if binding is off."""
    if not cpu_lists:
        return
    (cores,) = cpu_lists
    torch.set_num_threads(len(cores))
    # OpenMP threads are created by this one and inherit its affinity; EngineCore's other threads already exist. A
    # single thread is best left to the kernel's scheduler.
    if len(cores) > 1:
        os.sched_setaffinity(0, cores)


@contextmanager
def engines_forked_ahead(args: AsyncEngineArgs) -> Iterator[None]:
    """Fork the processes that become the EngineCores of this block, before this one has threads; none if they must be
    spawned, which is logged. To be entered in the main thread, with whose end they end. Raises OSError."""
    if not current_platform.is_cpu():
        yield
        return
    reason = "in a Ray actor" if is_in_ray_actor() else ""
    if args.numa_bind or "--numa-bind" in sys.argv:
        reason = "--numa-bind"
    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "spawn":
        reason = "VLLM_WORKER_MULTIPROC_METHOD is spawn"
    _let_modules_be_scanned()
    number = args.data_parallel_size_local or args.data_parallel_size
    with forked_ahead(0 if reason else number) as forked:
        if reason := reason or forked.reason:
            logger.info("EngineCore is spawned, not forked: %s", reason)
            yield
            return
        inner = utils.get_mp_context
        utils.get_mp_context = lambda: _fit(forked) or inner()
        try:
            yield
        finally:
            utils.get_mp_context = inner


def _let_modules_be_scanned() -> None:
    """vLLM's EngineCore looks at the `__dict__` of everything in all modules (`triton_utils/dispatcher.py`). llvmlite,
    which numba imports, and a spawned EngineCore does not have, has an object that gives a C function for any name."""
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None or not hasattr(ffi.lib, "__dict__"):
        return
    library = type(ffi.lib)
    inner = library.__getattr__

    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807 - replaces it
        if name == "__dict__":
            raise AttributeError(name)
        return inner(self, name)

    library.__getattr__ = __getattr__


def _fit(forked: ForkedContext) -> ForkedContext | None:
    """Called when vLLM has set the environment with which it would spawn EngineCore."""
    if missing := forked.lacks():
        logger.warning("EngineCore is spawned, not forked: this process was started without %s", missing)
        return None
    return forked


#: One of this number of polls is a sleep: 30-50 us of spinning, then about 55 us (default timer slack) for others.
LOOKS_PER_SLEEP = 32

#: After the last message. Steps of a generating model are closer together; an idle one has none.
SPIN_S = 0.01


class Spinning(SpinCondition):  # type: ignore[misc]  # vllm is not typed
    """vLLM's SpinCondition with both constants above."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.num_polls = 0
        if self.is_reader:
            self.busy_loop_s = SPIN_S

    def wait(self, timeout_ms: int | None = None) -> None:
        self.num_polls += 1
        if time.monotonic() > self.last_read + self.busy_loop_s:
            super().wait(timeout_ms)
        elif self.num_polls % LOOKS_PER_SLEEP:
            os.sched_yield()
        else:
            time.sleep(0)


def shorten_waits() -> None:
    """Have shared-memory readers made from now on wait like this, if this process computes on the CPU. Idempotent."""
    if current_platform.is_cpu():
        shm_broadcast.SpinCondition = Spinning
