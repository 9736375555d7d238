"""Simulated workers as processes of actors on a real Ray of this host, joining a gateway."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from joined_gateway import Gateway

from medialane import __version__
from medialane.cluster import members
from medialane.cluster.ray import RemoteSpec
from medialane.cluster.ray.remote import shared_path
from medialane.types.errors import StartupFailed
from waiting import eventually

ray = pytest.importorskip("ray", reason="ray is not installed (the extra ray)")
medialane_ray = pytest.importorskip("medialane.cluster.ray.ray_cluster")

pytestmark = [pytest.mark.whole, pytest.mark.timeout(120)]
#: A worker's process imports medialane, its actor's ray and medialane; several of them at once on a busy machine.
START_S = 60.0


@pytest.fixture(autouse=True)
async def _starting_a_process_takes_what_it_takes():
    """Ray's calls that start and kill actors block for some milliseconds, or much longer on a busy machine."""
    asyncio.get_running_loop().slow_callback_duration = 10


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory):
    """A Ray of one node, once for all tests: it takes seconds to start."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=2, num_gpus=0, namespace=medialane_ray.NAMESPACE, include_dashboard=False,
        object_store_memory=100 << 20, log_to_driver=False,
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture
async def cluster(local_ray):
    cluster = medialane_ray.RayCluster(times=medialane_ray.RayTimes(report_s=0.1, report_again_s=0.1))
    yield cluster
    await cluster.stop()
    cluster.close()
    assert ray.is_initialized()  # by this test, not by the cluster


@pytest.fixture
async def gateway():
    gateway = await Gateway().start()
    yield gateway
    await gateway.close()


def specs(gateway, number=2, **changes):
    join = ("--join", f"127.0.0.1:{gateway.port}")
    return [
        RemoteSpec(
            name=f"worker {i}",
            command=("worker", "m", "--engine", "simulated", *join),
            joins_as=f"{{host}}/{i}",
            num_cpus=0.5,
            **changes,
        )
        for i in range(number)
    ]


async def test_workers_join_and_none_is_left_after_a_stop(cluster, gateway):
    await cluster.spawn(specs(gateway), timeout_s=START_S)
    await eventually(lambda: len(gateway.ready) == 2, "2 workers have joined", START_S)
    assert gateway.ready == {f"{os.uname().nodename}/{i}" for i in range(2)}
    found = [await cluster.resolve(f"worker {i}") for i in range(2)]
    assert {each.node for each in found} == {cluster.node}
    assert all(members(each.pid) == [each.pid] for each in found)
    await cluster.stop()
    assert not any(members(each.pid) for each in found)


async def test_killed_worker_comes_back_as_a_new_incarnation(cluster, gateway):
    await cluster.spawn(specs(gateway, 1), timeout_s=START_S)
    await eventually(lambda: gateway.ready, "the worker has joined", START_S)
    (name,) = gateway.ready
    before, worker_id = await cluster.resolve("worker 0"), gateway.pool.links[name].client.welcome.worker_id
    os.kill(before.pid, signal.SIGKILL)
    await eventually(lambda: not gateway.ready, "the gateway has noticed the loss")
    end = await cluster.watch("worker 0")
    assert end.how == "killed by SIGKILL"
    await cluster.restart("worker 0")
    await eventually(lambda: gateway.ready == {name}, "the worker has joined again", START_S)
    after = await cluster.resolve("worker 0")
    assert (after.incarnation, after.pid) != (before.incarnation, before.pid)
    assert gateway.pool.links[name].client.welcome.worker_id != worker_id


async def test_killed_actor_ends_its_worker_and_ray_restarts_both(cluster, gateway):
    await cluster.spawn(specs(gateway, 1), timeout_s=START_S)
    await eventually(lambda: gateway.ready, "the worker has joined", START_S)
    before = await cluster.resolve("worker 0")
    os.kill(parent_of(before.pid), signal.SIGKILL)
    await eventually(lambda: not members(before.pid), "the worker has ended with its actor")
    assert "lost" in (await cluster.watch("worker 0")).how
    await cluster.restart("worker 0")
    await eventually(lambda: gateway.ready, "the worker has joined again", START_S)
    assert (await cluster.resolve("worker 0")).incarnation != before.incarnation


async def test_workers_that_cannot_start_report_why_and_where(cluster, gateway):
    first, second = specs(gateway)
    wrong_flag = msgspec.structs.replace(first, command=(*first.command, "--no-such-flag"))
    no_model = msgspec.structs.replace(second, command=("worker", "/no/such/model", *second.command[4:]))
    await cluster.spawn([wrong_flag, no_model], timeout_s=START_S)
    ends = [await asyncio.wait_for(cluster.watch(f"worker {i}"), START_S) for i in range(2)]
    assert [end.how for end in ends] == ["exit status 2"] * 2
    assert "unrecognized arguments: --no-such-flag" in ends[0].report
    assert ends[1].report.startswith(f"worker 1 on {os.uname().nodename}: /no/such/model is neither an existing folder")


async def test_missing_resources_are_named(cluster, gateway):
    (spec,) = specs(gateway, 1, num_gpus=1)
    with pytest.raises(
        StartupFailed,
        match=r"1 workers of 0\.5 CPU, 1 GPU each, free in the cluster: 2 CPU, 0 GPU; "
        r"its nodes can hold 0 of them if nothing else runs \([\d.]+ has 2 CPU, 0 GPU\)",
    ):
        await cluster.spawn([spec], timeout_s=1)


async def test_resources_that_are_missing_are_reported_while_they_are_waited_for(cluster, gateway, caplog):
    (spec,) = specs(gateway, 1, num_gpus=1)
    with pytest.raises(StartupFailed):
        await cluster.spawn([spec], timeout_s=1)
    assert caplog.text.count("waiting for Ray's resources: 1 workers of") >= 2


async def test_node_with_another_medialane_is_one_clear_error(cluster, gateway, monkeypatch):
    monkeypatch.setattr(medialane_ray, "__version__", "0.0.1")  # of this process only
    await cluster.spawn(specs(gateway, 1), timeout_s=START_S)
    end = await asyncio.wait_for(cluster.watch("worker 0"), START_S)
    assert f"medialane {__version__} is installed on {cluster.node}, 0.0.1 here" in end.report


async def test_process_of_a_node_runs_there_and_needs_no_cpu(cluster, gateway):
    taken = msgspec.structs.replace(specs(gateway, 1)[0], num_cpus=2)
    bound = msgspec.structs.replace(specs(gateway, 2)[1], node=cluster.node)
    await cluster.spawn([taken, bound], timeout_s=START_S)
    await eventually(lambda: len(gateway.ready) == 2, "both have joined", START_S)
    assert (await cluster.resolve("worker 1")).node == cluster.node


async def test_workers_of_a_node_have_one_store_which_survives_kills(cluster, gateway, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    found = [
        msgspec.structs.replace(
            spec,
            command=("worker", str(tmp_path), *spec.command[2:]),
            node_flags={"": ("--store", "unix:{folder}/store.sock", "--start-store")},
            shared_folder=f"test-{os.getpid()}",
            environ={"MEDIALANE_ARENA_SIZE": "16MiB"},
        )
        for spec in specs(gateway)
    ]
    socket = f"{shared_path(found[0])}/store.sock"
    await cluster.spawn(found, timeout_s=START_S)
    await eventually(lambda: len(arenas(gateway)) == 2, "both workers use a store", START_S)
    (arena,) = set(arenas(gateway))
    (store,) = stores_at(socket)

    os.kill(store, signal.SIGKILL)
    await eventually(lambda: has_successor(socket, store), "it has a successor", START_S)
    await eventually(lambda: arenas(gateway) == [arena, arena], "which has taken over its arena")

    (store,) = stores_at(socket)
    os.kill(parent_of(store), signal.SIGKILL)
    await eventually(lambda: len(gateway.ready) == 1, "the gateway has noticed the loss")
    await eventually(lambda: has_successor(socket, store), "the other worker has started a store", START_S)
    await eventually(lambda: len(arenas(gateway)) == 1, "and uses it")

    await cluster.stop()
    await eventually(lambda: not stores_at(socket), "its store has ended")
    assert not shared_path(found[0]).exists()


def arenas(gateway):
    """The arenas that connected workers have mapped."""
    clients = [gateway.pool.links[name].client for name in gateway.ready]
    return [client.reports.arena for client in clients if client is not None and client.reports.arena is not None]


def has_successor(socket, store):
    """Whether another store has an arena: earlier, a signal would end it without its clean-up."""
    return any(".arena" in Path(f"/proc/{pid}/maps").read_text() for pid in stores_at(socket) if pid != store)


def stores_at(socket):
    """The stores themselves: a fork that one is just making still has its command line."""
    commands = {pid: command_line(pid) for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))}
    named = [pid for pid, words in commands.items() if "store" in words[:4] and f"unix:{socket}" in words]
    return [pid for pid in named if parent_of(pid) not in (None, *named)]


def command_line(pid):
    with suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
        return file.read().replace("\0", " ").split()
    return []


def parent_of(pid):
    """None if the process has ended."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
    return None
