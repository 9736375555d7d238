"""The private seam that `vllm_bridge.cpu_waiting` leans on: the flag is read at every wait, by the waits that spin."""

import os

import pytest
import vllm.distributed.utils as waiting
from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

from medialane.vllm_bridge import cpu_waiting
from medialane.vllm_bridge.plugin import register


@pytest.fixture
def yields(monkeypatch):
    """How often a wait has called the kernel's sched_yield."""
    calls = []
    monkeypatch.setattr(os, "sched_yield", lambda: calls.append(1))
    monkeypatch.setattr(waiting, "USE_SCHED_YIELD", True)
    return calls


def test_engine_and_worker_wait_by_the_function_that_reads_the_flag(yields):
    assert shm_broadcast.sched_yield is waiting.sched_yield
    shm_broadcast.sched_yield()
    assert yields


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU host keeps vLLM's way to wait")
def test_plugin_makes_waits_on_a_cpu_sleep(yields):
    register()
    shm_broadcast.sched_yield()
    assert not yields


def test_gpu_host_keeps_vllms_way(yields, monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _self: False)
    cpu_waiting.install()
    shm_broadcast.sched_yield()
    assert yields
