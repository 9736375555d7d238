"""What is said about a cluster that cannot be used; Ray itself is in tests/integration/test_ray_workers.py."""

import asyncio
import socket
from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest

from medialane.cluster.ray import RemoteSpec
from medialane.types.errors import StartupFailed
from waiting import eventually

pytest.importorskip("ray", reason="ray is not installed (the extra ray)")

from ray.exceptions import TaskPlacementGroupRemoved

from medialane.cluster.ray import ray_cluster as ray


class FakeRay:
    """Ray without processes: not connected until `init` is called. Reservations are given up by it."""

    def __init__(self, init=None, context=None, nodes=()):
        self.init = init
        self.is_initialized = lambda: init is None
        self.get_runtime_context = lambda: context
        self.nodes = lambda: list(nodes)
        self.available_resources = dict
        self.util = self

    def placement_group(self, _bundles, *, strategy):
        assert strategy == "SPREAD"
        return SimpleNamespace(ready=self._ready)

    def remove_placement_group(self, group):
        """There is nothing to remove."""

    async def _ready(self):
        raise TaskPlacementGroupRemoved


def node(address, *, alive=True, **resources):
    return {"NodeManagerAddress": address, "Alive": alive, "Resources": resources}


def shortage(nodes, number=2, **free):
    spec = RemoteSpec(name="worker 0", command=(), num_cpus=1, num_gpus=4)
    return ray.shortage([spec] * number, nodes, free)


def test_nodes_that_are_too_small_are_named():
    found = shortage([node("10.0.0.1", CPU=8, GPU=2), node("10.0.0.2", CPU=8, GPU=2)], CPU=16, GPU=4)
    assert "2 workers of 1 CPU, 4 GPU each, free in the cluster: 16 CPU, 4 GPU" in found
    assert "its nodes can hold 0 of them if nothing else runs" in found
    assert "(10.0.0.1 has 8 CPU, 2 GPU, 10.0.0.2 has 8 CPU, 2 GPU)" in found


def test_nodes_that_are_in_use_are_told_from_those_that_are_too_small():
    found = shortage([node("10.0.0.1", CPU=8, GPU=8), node("10.0.0.2", alive=False, CPU=8, GPU=8)], CPU=8)
    assert "free in the cluster: 8 CPU, 0 GPU; its nodes can hold 2 of them" in found
    assert "10.0.0.2" not in found


def test_large_clusters_are_not_listed_whole():
    found = shortage([node(f"10.0.0.{i}", CPU=1) for i in range(20)])
    assert "10.0.0.7 has" in found
    assert "10.0.0.8 has" not in found
    assert "and 12 more nodes" in found


def test_address_without_a_listener_is_one_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(StartupFailed, match=f"^cannot connect to Ray at {address}: Connection refused; --address is"):
        ray.RayCluster(address)


def test_address_that_does_not_answer_is_given_up():
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        host, port = full.getsockname()
        for _ in range(8):  # the kernel accepts some of them, and answers no more
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, port))
        with pytest.raises(StartupFailed, match=f"^cannot connect to Ray at {host}:{port}: no answer"):
            ray.RayCluster(f"{host}:{port}", times=ray.RayTimes(connect_s=0.2))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            "Version mismatch: The cluster was started with:\n  Ray: 2.59.0\n  Python: 3.11.7\nThis process:\n  2.60",
            "Version mismatch: The cluster was started with: Ray: 2.59.0 Python: 3.11.7 This process: 2.60",
        ),
        (
            "The actor died because of an error raised in its creation task, ray::SupervisingActor.__init__()\n"
            "  File ...\nModuleNotFoundError: No module named 'medialane'",
            "The actor died because of an error raised in its creation task, ray::SupervisingActor.__init__(); "
            "ModuleNotFoundError: No module named 'medialane'",
        ),
    ],
)
def test_errors_of_ray_are_one_line_with_the_reason(error, text):
    def init(*_words, **_settings):
        raise RuntimeError(error)

    with pytest.raises(StartupFailed) as found:
        ray.RayCluster("auto", api=FakeRay(init))
    assert found.value.message == f"cannot connect to Ray at auto: {text}"


def test_cluster_that_refuses_us_may_need_its_token():
    def init(*_words, **_settings):
        raise ConnectionError("Failed to connect to Ray cluster")

    with pytest.raises(StartupFailed, match="RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"):
        ray.RayCluster("auto", api=FakeRay(init))


def test_node_that_is_started_here_keeps_little_shared_memory(monkeypatch):
    calls = []

    def init(address, **settings):
        calls.append((address, settings.get("object_store_memory")))
        if address == "auto":
            raise ConnectionError("no Ray here")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray.RayCluster(api=FakeRay(init))
    assert calls == [("auto", None), ("local", 80 << 20)]


class Services:
    """Sockets in place of Ray's head and raylet."""

    def __init__(self, lost_s=30.0):
        self.head, self.raylet = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
        context = SimpleNamespace(gcs_address=f"127.0.0.1:{self.head.getsockname()[1]}", get_node_id=lambda: "n")
        own = node("127.0.0.1", CPU=8) | {"NodeID": "n", "NodeManagerPort": self.raylet.getsockname()[1]}
        times = ray.RayTimes(check_s=0.01, lost_s=lost_s)
        self.cluster = ray.RayCluster(api=FakeRay(context=context, nodes=[own]), times=times)
        self.lost = asyncio.create_task(self.cluster.lost())

    def close(self):
        self.lost.cancel()
        self.head.close()
        self.raylet.close()


@pytest.fixture
async def services():
    with closing(Services()) as found:
        yield found


@pytest.fixture
async def short_services():
    """They may be away for half a second."""
    with closing(Services(lost_s=0.5)) as found:
        yield found


async def test_raylet_that_is_gone_is_reported_at_once_and_ends_the_cluster_soon(short_services, caplog):
    services = short_services
    services.raylet.close()
    await eventually(lambda: "Ray's raylet of this host does not answer: waiting 0.5 s" in caplog.text)
    assert not services.lost.done()
    assert (await services.lost).startswith("Ray's raylet of this host does not answer: restart Ray on this host")


async def test_head_that_comes_back_in_time_costs_nothing(services, caplog):
    port = services.head.getsockname()[1]
    services.head.close()
    await eventually(lambda: "Ray's head (GCS) does not answer" in caplog.text)
    services.head = socket.create_server(("127.0.0.1", port))
    await eventually(lambda: "Ray answers again" in caplog.text)
    assert not services.lost.done()


async def test_reservation_that_ray_gives_up_is_one_clear_error(services):
    services.raylet.close()
    worker = RemoteSpec(name="worker 0", command=())
    seen = []
    with pytest.raises(StartupFailed, match=r"^Ray has given up the reservation: Ray's raylet of this host does not"):
        await services.cluster.spawn([worker], timeout_s=5, entered=lambda name, phase: seen.append((name, phase.name)))
    assert seen == [("worker 0", "waiting for Ray's resources")]
