"""The private seam that `vllm_bridge.seams.cpu` leans on: message queues create their reader's `SpinCondition` by its
name in `shm_broadcast`, and call it to wait between two polls."""

import os
import time

import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

from medialane.vllm_bridge.engine.plugin import register
from medialane.vllm_bridge.seams import cpu as cpu_waiting

cpu_only = pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU host keeps vLLM's way to wait")


@pytest.fixture
def queue(vllms_condition):
    """A reader of a message queue, with its writer, in this process."""
    cpu_waiting.shorten_waits()
    writer = shm_broadcast.MessageQueue(1, 1)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    return reader, writer


def condition_of(reader):
    return reader._spin_condition  # vLLM's own: a reader has no other door to when it last read, and to its wait


@cpu_only
def test_plugin_replaces_the_condition_of_message_queues(vllms_condition, private_folder):
    private_folder().enter()
    register()
    assert shm_broadcast.SpinCondition is cpu_waiting.Spinning


def test_gpu_host_keeps_vllms_condition(vllms_condition, monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _self: False)
    cpu_waiting.shorten_waits()
    assert shm_broadcast.SpinCondition is vllms_condition


@cpu_only
def test_reader_alternates_spinning_and_sleeping_during_a_step(queue, monkeypatch):
    reader, _ = queue
    calls = []
    monkeypatch.setattr(os, "sched_yield", lambda: calls.append("yield"))
    monkeypatch.setattr(time, "sleep", lambda seconds: calls.append(("sleep", seconds)))
    condition_of(reader).last_read = time.monotonic() + 60  # as if it had just read
    for _ in range(2 * cpu_waiting.LOOKS_PER_SLEEP):
        condition_of(reader).wait()
    assert calls.count(("sleep", 0)) == 2
    assert calls.count("yield") == 2 * cpu_waiting.LOOKS_PER_SLEEP - 2


@cpu_only
def test_idle_reader_uses_no_cpu_time(queue):
    reader, _ = queue
    condition_of(reader).record_read()
    before = time.process_time()
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.5)
    assert time.process_time() - before < 0.2  # it spins for SPIN_S of the half second; vLLM's spins throughout


@cpu_only
def test_idle_reader_is_woken_by_a_message(queue):
    reader, writer = queue
    condition_of(reader).last_read = 0
    writer.enqueue(["a step"])
    assert reader.dequeue(timeout=5) == ["a step"]
