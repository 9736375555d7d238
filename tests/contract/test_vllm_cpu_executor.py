"""What `vllm_bridge.seams.cpu` leans on: vLLM accepts an executor by its qualified name, keeps it on a CPU, and
offers the cores that it would bind its own process to."""

import os

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from medialane.vllm_bridge.engine.engine_options import engine_args
from medialane.vllm_bridge.seams import cpu

pytestmark = [
    pytest.mark.skipif(not current_platform.is_cpu(), reason="on GPUs vLLM does so itself"),
    pytest.mark.timeout(120),  # the first test may have to build the model
]


def executor(model, *flags):
    """The class that vLLM uses for these flags."""
    return Executor.get_class(engine_args(str(model), ["--max-model-len=512", *flags]).create_engine_config())


def test_single_process_runs_the_model_if_possible(tiny_model):
    assert executor(tiny_model) is cpu.CpuExecutor


def test_executor_set_by_the_user_is_kept(tiny_model):
    assert executor(tiny_model, "--distributed-executor-backend=mp") is MultiprocExecutor


def test_multiple_ranks_use_vllms_executor(tiny_model):
    assert executor(tiny_model, "--tensor-parallel-size=2") is MultiprocExecutor


@pytest.fixture
def threads(monkeypatch):
    """The executor's calls to torch and the kernel."""
    asked = {}
    monkeypatch.setattr(torch, "set_num_threads", lambda number: asked.update(number=number))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: asked.update(pid=pid, cores=cores))
    return asked


def test_cpu_affinity_equals_vllms(tiny_model, threads, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "3-5")
    monkeypatch.setattr(UniProcExecutor, "_init_executor", lambda _self: None)
    config = engine_args(str(tiny_model), ["--max-model-len=512"]).create_engine_config()
    cpu.CpuExecutor(config)
    assert threads == {"number": 3, "pid": 0, "cores": [3, 4, 5]}


def test_single_thread_may_run_on_every_core(threads):
    cpu.set_threads([[1]])
    assert threads == {"number": 1}


def test_affinity_is_unchanged_if_binding_is_disabled(tiny_model, threads, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setattr(UniProcExecutor, "_init_executor", lambda _self: None)
    cpu.CpuExecutor(engine_args(str(tiny_model), ["--max-model-len=512"]).create_engine_config())
    assert threads == {}
