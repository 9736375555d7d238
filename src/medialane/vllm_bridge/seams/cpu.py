"""vLLM's CPU execution: executor, choice of cores, waiting for other processes."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.utils.ompmultiprocessing import OMPProcessManager
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
