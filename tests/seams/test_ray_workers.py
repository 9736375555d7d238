"""Simulated workers as processes of actors on a real Ray of this host, joining a gateway."""

import asyncio
import os
import signal

import msgspec
import pytest
from joined_gateway import Gateway

from medialane.cluster.process_group import members
from medialane.cluster.remote import RemoteSpec
from medialane.core.errors import StartupFailed
from waiting import eventually

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'medialane[ray]'")

pytestmark = pytest.mark.timeout(120)
#: A worker's process imports medialane, its actor's ray and medialane; several of them at once on a busy machine.
START_S = 60.0


@pytest.fixture(autouse=True)
async def _starting_a_process_takes_what_it_takes():
    """Ray's calls that start and kill actors block for some milliseconds, or much longer on a busy machine."""
    asyncio.get_running_loop().slow_callback_duration = 10


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory):
    """A Ray of one node, once for all tests: it takes seconds to start."""
    from medialane.cluster.ray import NAMESPACE

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=2, num_gpus=0, namespace=NAMESPACE, include_dashboard=False, object_store_memory=100 << 20,
        log_to_driver=False,
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture
async def cluster(local_ray):
    from medialane.cluster.ray import RayCluster

    cluster = RayCluster()
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
    assert {each.node_id for each in found} == {cluster.node_id}
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
    os.kill(supervisor_of(before.pid), signal.SIGKILL)
    await eventually(lambda: not members(before.pid), "the worker has ended with its actor")
    assert "lost" in (await cluster.watch("worker 0")).how
    await cluster.restart("worker 0")
    await eventually(lambda: gateway.ready, "the worker has joined again", START_S)
    assert (await cluster.resolve("worker 0")).incarnation != before.incarnation


async def test_a_worker_that_cannot_start_reports_why(cluster, gateway):
    (spec,) = specs(gateway, 1)
    broken = msgspec.structs.replace(spec, command=(*spec.command, "--no-such-flag"))
    await cluster.spawn([broken], timeout_s=START_S)
    end = await asyncio.wait_for(cluster.watch("worker 0"), START_S)
    assert end.how == "exit status 2"
    assert "unrecognized arguments: --no-such-flag" in end.report


async def test_missing_resources_are_named(cluster, gateway):
    (spec,) = specs(gateway, 1, num_gpus=1)
    with pytest.raises(StartupFailed, match=r"1 workers of 0\.5 CPU, 1 GPU each, free in the cluster: 2 CPU, 0 GPU"):
        await cluster.spawn([spec], timeout_s=1)


def supervisor_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
