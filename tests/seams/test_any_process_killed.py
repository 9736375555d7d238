"""kill -9 of the store, a gateway, a worker or a preparer at each step of two requests: no answer is wrong, and the
host is as before. At each step everything in the arena that is not held is overwritten."""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from gates import STEPS, Gates
from gateway_parts import png
from host_program import GATEWAYS, NUM_TOKENS, Line, Question, address
from medialane_process import launch
from process_tree import command_of, descendants, is_alive

from host_state import as_before, state_of, stats_of, store_link
from http_origin import HttpOrigin, answer
from waiting import eventually, wait_until

TESTS = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("host_program.py")
#: One for each gateway.
IMAGES = [png(300, 200, seed) for seed in range(len(GATEWAYS))]
START_S = 60


class Host:
    """The processes of host_program.py, a connection of the tests to their store, and an origin of the images."""

    def __init__(self, pid, folder, link, origin):
        self.pid, self.folder, self.origin = pid, folder, origin
        self.gates = Gates(folder)
        self._link = link

    def pid_of(self, name):
        (found,) = [pid for pid in descendants(self.pid) if f"{PROGRAM.name} {name} " in command_of(pid)]
        return found

    def preparer(self):
        """One that is idle."""
        return self._link.status.stats.preparers.pids[0]

    async def ask(self, number, **image):
        """The tokens of a gateway's answer, or the code of its error."""
        tokens, last = [], Line()
        try:
            async for last in self._lines(number, Question(**image)):
                tokens += last.tokens
        except ConnectionError:
            return "connection lost"
        return last.error or tokens if last.ended else "connection lost"

    async def _lines(self, number, question):
        path = address(self.folder, GATEWAYS[number]).removeprefix("unix:")
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            writer.write(msgspec.json.encode(question) + b"\n")
            while line := await reader.readline():
                yield msgspec.json.decode(line, type=Line)
        finally:
            writer.close()

    async def state(self):
        """Includes how many workers each gateway shares memory with."""
        try:
            mapped = [line.num_mapped for i in range(len(GATEWAYS)) async for line in self._lines(i, Question())]
        except OSError:
            mapped = []  # a gateway is starting
        return await state_of(self.pid, self._link, *mapped)

    async def kill(self, pid, *, is_holder):
        """With `is_holder`, wait until the store has ended its holds, too."""
        before = (await stats_of(self._link)).arena.num_leases
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: not is_alive(pid), "it is dead")

        async def ended():
            return (await stats_of(self._link)).arena.num_leases < before

        if is_holder:
            await eventually(ended, "its holds have ended")

    async def evict(self):
        """Free, and overwrite, everything that is not held."""
        store = self.pid_of("store")

        async def evicted():
            os.kill(store, signal.SIGUSR1)  # each time: a hold may have ended since
            arena = (await stats_of(self._link)).arena
            return arena.published_bytes == arena.pinned_bytes

        await eventually(evicted, "all is evicted that is not held")


@pytest.fixture(scope="module")
def processes():
    """The host's process, and its folder."""
    # Also of its arenas: until the next store reaps it, that of a killed store would fail tests that run beside these.
    folder = Path(tempfile.mkdtemp(prefix="ml-host-", dir="/dev/shm"))
    paths = [str(TESTS), str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": ":".join(filter(None, paths))}
    process = launch([sys.executable, str(PROGRAM), "host", str(folder)], environ=environ, log=folder / "host.log")
    try:
        ready = folder / "ready"
        wait_until(lambda: ready.exists() or process.poll() is not None, "the host is ready", START_S)
        assert process.poll() is None, (folder / "host.log").read_text()
        yield process.pid, folder
    finally:
        process.terminate()
        assert process.wait(START_S) == 0, (folder / "host.log").read_text()
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
        return host.gates.arrived()[0] if step in STEPS[-2:] else host.pid_of("worker-0")
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
        is_rerouted = kind == "worker" and step == "before first token"
        is_holder = kind in ("gateway", "worker") and step in STEPS[-2:]
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
        elif (kind, step) == ("preparer", "prepare"):
            expected = ["media_decoder_crashed"] * len(tasks)
        elif num_lost and not is_rerouted:
            assert results.count("worker_lost") == num_lost
            expected = ["worker_lost" if r == "worker_lost" else e for r, e in zip(results, expected, strict=True)]
        assert results == expected
    assert [await host.ask(number, data=data) for number, data in enumerate(IMAGES)] == right
