"""kill -9 of the store, a gateway, a worker or a preparer at each step of two requests: no answer is wrong, and the
host is as before. At each step everything in the arena that is not held is overwritten."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from gates import STEPS, WORKER_STEPS
from gateway_parts import png
from host_processes import Host, started_host, stop_host, wait_for_host
from host_program import GATEWAYS, NUM_TOKENS, address

from host_state import as_before, store_link
from http_origin import HttpOrigin, answer
from waiting import eventually

#: One for each gateway.
IMAGES = [png(300, 200, seed) for seed in range(len(GATEWAYS))]


@pytest.fixture(scope="module")
def processes():
    """The host's process, and its folder."""
    # Also of its arenas: until the next store reaps it, that of a killed store would fail tests that run beside these.
    folder = Path(tempfile.mkdtemp(prefix="ml-host-", dir="/dev/shm"))
    process = started_host(folder)
    try:
        wait_for_host(process, folder)
        yield process.pid, folder
    finally:
        stop_host(process, folder)
        shutil.rmtree(folder)


@pytest.fixture
async def host(processes):
    pid, folder = processes
    async with store_link(address(folder, "store"), folder) as link, HttpOrigin() as origin:
        host = Host(pid, folder, link, origin)
        yield host
        for step in STEPS:  # after a failure
            host.gates.open(step)


@pytest.fixture
async def right(host):
    """The undisturbed answer of each gateway."""
    await host.evict()
    answers = [await host.ask(number, data=data) for number, data in enumerate(IMAGES)]
    assert list(map(len, answers)) == [NUM_TOKENS] * len(IMAGES)
    return answers


async def started(host, step):
    """Start a request at each gateway, which are at `step`. Returns their tasks."""
    host.gates.close(step)
    is_shared = step in ("fetch", "upload", "prepare")  # of the same image, while it is being made
    for number, data in enumerate(IMAGES):
        host.origin.routes[f"/{number}"] = held_back(host.gates, answer(body=data))
    asked = [number * (not is_shared) for number in range(len(GATEWAYS))]
    images = [{"url": host.origin.url(f"/{image}")} if step == "fetch" else {"data": IMAGES[image]} for image in asked]
    tasks = [asyncio.create_task(host.ask(number, **image)) for number, image in enumerate(images)]
    num_arrivals = 1 if step in ("fetch", "prepare") else len(tasks)
    await eventually(lambda: len(host.gates.arrived()) == num_arrivals, f"at {step!r}", more=lambda: tasks)
    return tasks, asked


def held_back(gates, respond):
    async def wait(request, writer):
        await gates.passed("fetch")
        await respond(request, writer)

    return wait


def victim_of(host, kind, step):
    """The process to kill: the one in which the requests are, if it is of this kind."""
    if kind in ("store", "gateway"):
        return host.pid_of("store" if kind == "store" else GATEWAYS[0])
    if kind == "worker":
        return host.gates.arrived()[0] if step in WORKER_STEPS else host.pid_of("worker-0")
    return host.gates.arrived()[0] if step == "prepare" else host.preparer()


@pytest.mark.timeout(90)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", ["store", "gateway", "worker", "preparer"])
async def test_killed_process_costs_its_own_requests_and_no_answer_is_wrong(host, right, kind, step):
    async with as_before(host.state):
        await host.evict()
        tasks, images = await started(host, step)
        victim = victim_of(host, kind, step)
        num_lost = host.gates.arrived().count(victim) if kind == "worker" else 0
        is_rerouted = kind == "worker" and step in WORKER_STEPS[:-1]
        is_holder = kind in ("gateway", "worker") and step in WORKER_STEPS
        await host.kill(victim, is_holder=is_holder and not is_rerouted)
        if is_rerouted:
            await eventually(lambda: len(host.gates.arrived()) == len(tasks) + num_lost, "the other worker has all")
        if kind != "store":
            await host.evict()
        host.gates.open(step)
        results = await asyncio.gather(*tasks)
        expected = [right[image] for image in images]
        if kind == "gateway":
            expected[0] = "connection lost"
        elif num_lost and not is_rerouted:
            assert results.count("worker_lost") == num_lost
            expected = ["worker_lost" if r == "worker_lost" else e for r, e in zip(results, expected, strict=True)]
        assert results == expected
    assert [await host.ask(number, data=data) for number, data in enumerate(IMAGES)] == right
