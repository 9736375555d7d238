"""vLLM's CPU execution: executor, cores, waiting for other processes, and how its front end starts EngineCores (by
`spawn`, as new interpreters)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext

from vllm.config import VllmConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.ray.lazy_utils import is_in_ray_actor
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.v1.engine import utils
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class OneProcessExecutor(UniProcExecutor):  # type: ignore[misc]  # vllm is not typed
    """vLLM's executor in EngineCore's own process, with a hook before the model is loaded."""

    def before_load(self) -> None:
        """Called once, on the thread that will run the model."""

    def _init_executor(self) -> None:
        self.before_load()
        super()._init_executor()


def cores_of_ranks(config: VllmConfig) -> list[list[int]]:
    """Return the cores to which vLLM would bind each local rank's process; empty if binding is off."""
    return OMPProcessManager(config).cpu_lists


def wait_by(condition: type[SpinCondition]) -> None:
    """Make shared-memory readers created from now on wait with `condition`, a subclass of SpinCondition."""
    shm_broadcast.SpinCondition = condition


@contextmanager
def engines_of(context: Callable[[], BaseContext | None]) -> Iterator[None]:
    """Make vLLM start the engines of this block by the context that is returned; by its own if that is None."""
    inner = utils.get_mp_context
    utils.get_mp_context = lambda: context() or inner()
    try:
        yield
    finally:
        utils.get_mp_context = inner


def why_spawned() -> str:
    """Return why vLLM would not fork on any platform; empty if it would."""
    if "--numa-bind" in sys.argv:
        return "--numa-bind"
    return "in a Ray actor" if is_in_ray_actor() else ""
