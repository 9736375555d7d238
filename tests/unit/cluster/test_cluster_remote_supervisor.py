import asyncio

import pytest
from scripted_processes import Recorder

from medialane.cluster.ray import RemoteSpec, RemoteSupervisor, remote_supervisor
from medialane.cluster.ray.remote import Location, RunEnd
from medialane.config import ClusterConfig
from medialane.runtime.phase import Phase
from medialane.types.errors import StartupFailed
from waiting import eventually


class FakeCluster:
    """An orchestrator whose processes end when a test says so."""

    def __init__(self, calls):
        self.calls = calls
        self.runs = {}
        self.incarnations = {}
        self.answering = set()

        self.is_lost = asyncio.get_running_loop().create_future()
        self.phases = {}

    async def spawn(self, specs, *, timeout_s, entered):
        for spec in specs:
            entered(spec.name, Phase("waiting for its host"))
            self._start(spec.name)

    async def lost(self):
        return await self.is_lost

    async def resolve(self, name):
        if self.runs[name].done():
            return None
        return Location(
            "host-a", "10.0.0.1", 7, str(self.incarnations[name]), name in self.answering, self.phases.get(name)
        )

    async def watch(self, name):
        return await asyncio.shield(self.runs[name])

    async def restart(self, name):
        self._start(name)

    async def stop(self):
        self.calls.append("cluster stops")

    def kill(self):
        self.calls.append("cluster killed")

    def end(self, name, how="killed by SIGKILL"):
        self.runs[name].set_result(RunEnd(how, f"{name} on host-a: {how}"))

    def _start(self, name):
        self.incarnations[name] = self.incarnations.get(name, 0) + 1
        self.runs[name] = asyncio.get_running_loop().create_future()


class FakeLocal:
    """The supervisor of this host's processes."""

    def __init__(self, calls):
        self.calls = calls
        self.error = None
        self.ended = asyncio.Event()

    async def start(self):
        if self.error:
            raise self.error

    async def wait(self):
        await self.ended.wait()

    async def stop(self):
        self.calls.append("gateways stop")
        self.ended.set()

    def kill(self):
        self.calls.append("gateways killed")


class Running:
    def __init__(self, others=(), **settings):
        self.calls = []
        self.cluster, self.local, self.observer = FakeCluster(self.calls), FakeLocal(self.calls), Recorder()
        self.connected = set()
        specs = [RemoteSpec(name=f"worker {i}", command=("worker", "m"), joins_as=f"{{host}}/{i}") for i in range(2)]
        specs += [
            RemoteSpec(name=each, command=("serve", "m"), ready_url="http://x", node="10.0.0.1") for each in others
        ]

        async def connected():
            return self.connected

        self.supervisor = RemoteSupervisor(
            self.local,
            self.cluster,
            specs,
            config=ClusterConfig(**{"restart_initial_s": 0.01, "restart_max_s": 0.02, **settings}),
            observer=self.observer,
            connected=connected,
        )

    async def started(self):
        self.connected = {"host-a/0", "host-a/1"}
        await self.supervisor.start()
        return self


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr(remote_supervisor, "_POLL_S", 0.01)


@pytest.fixture
async def run():
    runs = []

    def make(others=(), **settings):
        runs.append(Running(others, **settings))
        return runs[-1]

    yield make
    for each in runs:
        await each.supervisor.stop()


async def test_start_ends_when_every_worker_has_joined(run):
    running = run()
    starting = asyncio.create_task(running.supervisor.start())
    running.connected = {"host-a/0", "elsewhere/1"}
    await eventually(lambda: running.observer.count("ready", "worker 0"))
    assert not starting.done()
    running.connected = {"host-a/0", "host-a/1"}
    await starting
    assert running.observer.count("ready") == 2


async def test_start_waits_for_the_gateways_of_other_hosts(run):
    running = run(["gateways of 10.0.0.1"])
    running.connected = {"host-a/0", "host-a/1"}
    starting = asyncio.create_task(running.supervisor.start())
    await eventually(lambda: running.observer.count("ready") == 2)
    assert not starting.done()
    running.cluster.answering.add("gateways of 10.0.0.1")
    await starting
    assert running.observer.count("ready", "gateways of 10.0.0.1") == 1


async def test_worker_that_ends_during_the_start_fails_it_with_its_report(run):
    running = run()
    starting = asyncio.create_task(running.supervisor.start())
    await eventually(lambda: running.observer.count("starting") == 2 and "worker 1" in running.cluster.runs)
    running.cluster.end("worker 1", "exit status 2")
    with pytest.raises(StartupFailed, match="worker 1 on host-a: exit status 2"):
        await starting
    assert running.observer.pauses == [None]


async def test_process_of_this_host_that_fails_fails_the_start(run):
    running = run()
    running.local.error = StartupFailed("gateway did not start")
    with pytest.raises(StartupFailed, match="gateway did not start"):
        await running.supervisor.start()


async def test_worker_that_never_joins_is_named(run):
    running = run(start_timeout_s=0.1)
    running.connected = {"host-a/0"}
    with pytest.raises(StartupFailed, match=r"^worker 1: not ready after 0\.1 s; can its host reach --join-listen\?"):
        await running.supervisor.start()


async def test_worker_that_ends_later_is_restarted_as_a_new_incarnation(run):
    running = await run().started()
    running.connected = {"host-a/1"}
    running.cluster.end("worker 0")
    await eventually(lambda: running.cluster.incarnations["worker 0"] == 2)
    assert running.observer.count("ended", "worker 0", "killed by SIGKILL") == 1
    running.connected = {"host-a/0", "host-a/1"}
    await eventually(lambda: running.observer.count("ready", "worker 0") == 2)
    assert running.cluster.incarnations["worker 1"] == 1


async def test_restarts_back_off(run):
    running = await run().started()
    for number in range(2, 6):
        running.cluster.end("worker 0")
        await eventually(lambda number=number: running.cluster.incarnations["worker 0"] == number)
    assert running.observer.pauses == [0, 0.01, 0.02, 0.02], "the first time at once: it had been ready"


async def test_worker_that_had_joined_and_ends_while_others_start_is_restarted(run):
    running = run()
    running.connected = {"host-a/0"}
    starting = asyncio.create_task(running.supervisor.start())
    await eventually(lambda: running.observer.count("ready", "worker 0"))
    running.cluster.end("worker 0")
    await eventually(lambda: running.cluster.incarnations["worker 0"] == 2)
    running.connected = {"host-a/0", "host-a/1"}
    await starting
    assert running.observer.pauses == [0]


async def test_gateways_stop_before_workers_and_none_is_restarted(run):
    running = await run().started()
    stopping = asyncio.create_task(running.supervisor.stop())
    running.cluster.end("worker 0")
    await stopping
    assert running.calls == ["gateways stop", "cluster stops"]
    assert running.cluster.incarnations["worker 0"] == 1


async def test_kill_reaches_both(run):
    running = await run().started()
    running.supervisor.kill()
    assert running.calls == ["gateways killed", "cluster killed"]


async def test_supervision_that_fails_is_raised(run):
    running = await run().started()
    running.cluster.runs["worker 0"].set_exception(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        await running.supervisor.wait()


async def test_phases_of_processes_of_other_hosts_are_shown(run):
    running = run()
    running.cluster.phases["worker 0"] = Phase("loading the weights", 2, 5)
    starting = asyncio.create_task(running.supervisor.start())
    await eventually(lambda: ("worker 0", "loading the weights 2/5") in running.observer.phases)
    assert running.observer.phases[:2] == [(f"worker {i}", "waiting for its host") for i in range(2)]
    running.connected = {"host-a/0", "host-a/1"}
    await starting


@pytest.mark.parametrize("is_started", [False, True])
async def test_orchestrator_that_is_lost_ends_start_and_supervision_with_the_reason(run, is_started):
    running = run()
    if is_started:
        await running.started()
    running.cluster.is_lost.set_result("Ray's raylet of this host does not answer")
    with pytest.raises(StartupFailed, match=r"^Ray's raylet of this host does not answer$"):
        await (running.supervisor.wait() if is_started else running.supervisor.start())
