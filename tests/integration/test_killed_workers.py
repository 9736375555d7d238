"""Worker processes over the simulated engine, supervised as by `serve`, killed under the parts of a gateway."""

import asyncio
import os
import signal
import sys
import tempfile
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from gateway_parts import Parts, png, prompt
from host_store import store_address

from host_state import as_before, state_of
from medialane.cluster import ProcessSpec, SocketExists, Supervisor
from medialane.config import ClusterConfig
from medialane.gateway import open_scope
from medialane.types.errors import NoWorkerReady, WorkerLost
from medialane.types.request import EngineRequest, ExpandedPrompt
from process_ends import ProcessEnds
from supervised import running
from waiting import eventually

pytestmark = [pytest.mark.whole, pytest.mark.timeout(60)]  # processes are started, and again

NAMES = ("worker 0", "worker 1")
#: Tokens of an answer during which a worker is killed: three seconds of them, at 5 ms a step.
NUM_TOKENS = 600


class Cluster:
    """Two supervised worker processes, and a gateway's parts in this one."""

    def __init__(self, parts, supervisor, ends, sockets):
        self.parts, self.supervisor, self.ends = parts, supervisor, ends
        self._addresses = {name: f"unix:{path}" for name, path in sockets.items()}
        self._num_begun = 0

    def num_in_flight(self, name):
        client = self.parts.links.links[self._addresses[name]].client
        return len(client.requests) if client is not None else 0

    @property
    def num_ready(self):
        return self.parts.links.num_ready

    def send(self, name, number):
        """Send a signal. Returns the id of the process."""
        pid = self.supervisor.pids[name]
        os.kill(pid, number)
        return pid

    async def answer(self, seed, *, max_tokens=4):
        """The output's tokens, for an image of its own for each seed."""
        with open_scope():
            prepared = await self.parts.gateway.prepare(prompt(png(seed=seed)))
            params = msgspec.msgpack.encode({"max_tokens": max_tokens, "output_kind": 1})
            wanted = EngineRequest(f"r{seed}", ExpandedPrompt(prepared.token_ids), params)
            async with asyncio.timeout(20), aclosing(self.parts.gateway.generate(wanted, prepared)) as deltas:
                found = []
                async for delta in deltas:
                    tokens = delta.completions[0].token_ids
                    self._num_begun += bool(tokens) and not found  # without one, it would go to another worker
                    found += tokens
                return found

    async def long_answers(self, number):
        """Start this many, on both workers; all have a token."""
        with open_scope():  # so that all of them start at once
            await asyncio.gather(*(self.parts.gateway.prepare(prompt(png(seed=seed))) for seed in range(number)))
        self._num_begun = 0
        tasks = [asyncio.create_task(self.answer(seed, max_tokens=NUM_TOKENS)) for seed in range(number)]
        await eventually(lambda: self._num_begun == number)
        assert all(map(self.num_in_flight, NAMES))
        return tasks

    async def is_back(self, name, killed):
        await eventually(lambda: self.num_ready == len(NAMES), f"{name} is back")
        assert self.supervisor.pids[name] != killed

    async def state(self):
        return await state_of(os.getpid(), self.parts.store.link, self.num_ready)


@pytest.fixture
async def cluster(arena, preparers):
    recorder = ProcessEnds()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        sockets = {name: Path(folder, f"{name[-1]}.sock") for name in NAMES}
        specs = [
            ProcessSpec(name, _command(path, arena), dict(os.environ), SocketExists(path))
            for name, path in sockets.items()
        ]
        config = ClusterConfig(restart_initial_s=0.05)
        supervisor = Supervisor(specs, config=config, logs=Path(folder), observer=recorder)
        workers = [SimpleNamespace(address=f"unix:{path}", attaches=True) for path in sockets.values()]
        async with running(supervisor), Parts(arena, preparers, workers) as parts:
            cluster = Cluster(parts, supervisor, recorder.ends, sockets)
            async with as_before(cluster.state):
                yield cluster


def _command(path, arena):
    own = ("--listen", f"unix:{path}", "--store", store_address(arena), "--arena-directory", str(arena.path.parent))
    return (
        *(sys.executable, "-m", "medialane", "worker", "m", "--engine", "simulated"),
        *(*own, "--simulated-step-ms", "5", "--simulated-prefill-token-ms", "0"),
    )


async def test_killed_worker_fails_its_requests_at_once_and_others_continue(cluster):
    answers = await cluster.long_answers(4)
    num_lost = cluster.num_in_flight("worker 0")
    killed = cluster.send("worker 0", signal.SIGKILL)
    await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
    assert cluster.num_ready == 1  # before the restart
    assert len(await cluster.answer(10)) == 4
    results = await asyncio.gather(*answers, return_exceptions=True)
    assert sum(isinstance(result, WorkerLost) for result in results) == num_lost
    assert [len(result) for result in results if isinstance(result, list)] == [NUM_TOKENS] * (4 - num_lost)
    await cluster.is_back("worker 0", killed)
    assert ("worker 0", "killed by SIGKILL") in cluster.ends
    before = await asyncio.gather(*map(cluster.answer, range(4)))
    assert before == await asyncio.gather(*map(cluster.answer, range(4)))
    assert [len(answer) for answer in before] == [4] * 4


async def test_without_any_worker_requests_are_refused_until_one_is_back(cluster):
    answers = await cluster.long_answers(2)
    killed = [cluster.send(name, signal.SIGKILL) for name in NAMES]
    results = await asyncio.gather(*answers, return_exceptions=True)
    assert [type(result) for result in results] == [WorkerLost] * 2
    with pytest.raises(NoWorkerReady) as refused:
        await cluster.answer(0)
    assert refused.value.retry_after_s
    await asyncio.gather(*map(cluster.is_back, NAMES, killed))
    assert len(await cluster.answer(0)) == 4


async def test_worker_stopped_with_a_request_in_flight_exits_cleanly(cluster):
    answers = await cluster.long_answers(2)
    stopped = cluster.send("worker 0", signal.SIGTERM)
    assert [len(each) for each in await asyncio.gather(*answers)] == [NUM_TOKENS] * 2
    await cluster.is_back("worker 0", stopped)
    assert ("worker 0", "exit status 0") in cluster.ends
