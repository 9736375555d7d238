"""What `vllm_bridge.seams.cpu` leans on: vLLM accepts an executor by its qualified name, keeps it on a CPU, and
offers the cores that it would bind its own process to."""

import os

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from medialane.vllm_bridge.seams import cpu
from model_parts import engine_config

pytestmark = [
    pytest.mark.skipif(not current_platform.is_cpu(), reason="on GPUs vLLM does so itself"),
    pytest.mark.timeout(120),  # the first test may have to build the model
]


def executor(model, *flags):
    """The class that vLLM uses for these flags."""
    return Executor.get_class(engine_config(model, "--max-model-len=512", *flags))


def test_single_process_runs_the_model_if_possible(tiny_model):
    assert executor(tiny_model) is cpu.CpuExecutor


def test_executor_set_by_the_user_is_kept(tiny_model):
    assert executor(tiny_model, "--distributed-executor-backend=mp") is MultiprocExecutor


def test_multiple_ranks_use_vllms_executor(tiny_model):
    assert executor(tiny_model, "--tensor-parallel-size=2") is MultiprocExecutor


@pytest.fixture
def cores():
    """Two cores of this machine. The thread runs on the first one, and as before afterwards, as torch's threads do."""
    allowed, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    if len(allowed) < 2:
        pytest.skip("this machine has one core")
    found = sorted(allowed)[:2]
    os.sched_setaffinity(0, found[:1])
    yield found
    os.sched_setaffinity(0, allowed)
    torch.set_num_threads(num_threads)


@pytest.fixture
def make_executor(tiny_model, monkeypatch):
    """Makes the executor of a model that is not loaded."""
    monkeypatch.setattr(UniProcExecutor, "_init_executor", lambda _self: None)  # vLLM's: it loads the model
    return lambda: cpu.CpuExecutor(engine_config(tiny_model, "--max-model-len=512"))


def test_cpu_affinity_equals_vllms(make_executor, cores, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    make_executor()
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (2, set(cores))


def test_single_thread_may_run_on_every_core(cores):
    torch.set_num_threads(2)
    cpu.set_threads([cores[1:]])
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (1, {cores[0]})


def test_affinity_is_unchanged_if_binding_is_disabled(make_executor, cores, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    torch.set_num_threads(2)
    make_executor()
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (2, {cores[0]})
