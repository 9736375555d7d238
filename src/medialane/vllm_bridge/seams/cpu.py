"""How vLLM runs a model on a CPU: its executor, its choice of cores, its wait for other processes."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class OneProcessExecutor(UniProcExecutor):  # type: ignore[misc]  # vllm is not typed
    """vLLM's executor of a model in EngineCore's own process, with a step before the model is loaded."""

    def before_load(self) -> None:
        """Called once, on the thread that will run the model."""

    def _init_executor(self) -> None:
        self.before_load()
        super()._init_executor()


def cores_of_ranks(config: VllmConfig) -> list[list[int]]:
    """The cores that vLLM would bind each local rank's process to; empty where binding is off."""
    found: list[list[int]] = OMPProcessManager(config).cpu_lists
    return found


def wait_by(condition: type[SpinCondition]) -> None:
    """Have readers of shared memory that are made from now on wait by `condition`, a subclass of SpinCondition."""
    shm_broadcast.SpinCondition = condition


__all__ = ["OneProcessExecutor", "SpinCondition", "cores_of_ranks", "wait_by"]
