"""Operators list, add, drain and remove workers, at all gateways of a port. The workers' sockets are real."""

import asyncio
import contextlib

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from medialane.core.errors import InvalidRequest, WorkerInUse, WorkerLost
from medialane.core.request import EngineRequest, ExpandedPrompt
from medialane.gateway import ChangedWorkersFile, GatewayConfig, WorkerControl, WorkerInfo, WorkerLink, WorkerPool
from medialane.observability import Metrics
from medialane.testing.fake_handler import FAKE_CARD, FakeHandler
from medialane.wire import Hello, RpcConfig
from medialane.worker.gateway_link import RpcServer
from waiting import eventually

RPC = RpcConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=1.0)
PROCESSOR = {"model": "m"}


class Gateways:
    """Several gateways of a port, which share a file."""

    def __init__(self, folder, configured):
        self.configured = configured
        self.path = str(folder / "workers.json")
        self.members = []
        self.silent = set()
        self._stack = contextlib.AsyncExitStack()

    def start(self):
        """One more of them."""
        index = len(self.members)
        config, metrics = GatewayConfig(reconnect_initial_s=0.01, reconnect_max_s=0.02), Metrics(CollectorRegistry())
        hello = Hello(gateway_id=f"g{index}", processor=PROCESSOR)
        file = ChangedWorkersFile(self.path)

        def link(name, address):
            return WorkerLink(name, hello, address=address, rpc=RPC, config=config, metrics=metrics)

        wanted = file.read().applied_to(self.configured)
        pool = WorkerPool([link(*each) for each in wanted.items()], new_link=link, processor=PROCESSOR, config=config)

        async def ask_others(path):
            others = {str(number): each for number, (_, each) in enumerate(self.members) if number != index}
            return {
                number: None if number in self.silent else await each.answers[path](path)
                for number, each in others.items()
            }

        control = WorkerControl(
            pool, configured=self.configured, file=file, rpc=RPC, ask_others=ask_others, index=str(index)
        )
        self.members.append((pool, control))
        running = asyncio.create_task(pool.run())
        self._stack.push_async_callback(_end, running)
        return pool, control

    async def close(self):
        await self._stack.aclose()


async def _end(task):
    task.cancel()
    await asyncio.wait([task])


@pytest.fixture
async def worker(tmp_path):
    """Starts a worker; returns its address and its handler."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(name, card=FAKE_CARD, **settings):
            handler = FakeHandler(card=card, **settings)
            server = RpcServer(handler, RPC)
            await server.serve(f"unix:{tmp_path}/{name}.sock")
            stack.push_async_callback(server.close)
            return f"unix:{tmp_path}/{name}.sock", handler

        yield start


@pytest.fixture
async def gateways(tmp_path, worker):
    """Two gateways with one configured worker, to which they are connected."""
    address, _ = await worker("first")
    gateways = Gateways(tmp_path, {"first": address})
    for _ in range(2):
        pool, _ = gateways.start()
        await eventually(lambda pool=pool: pool.links["first"].client is not None)
    yield gateways
    await gateways.close()


async def listed(control):
    return {each.name: each for each in msgspec.json.decode(await control.listed({}), type=list[WorkerInfo])}


async def test_added_worker_is_used_by_all_gateways_and_by_those_that_start_later(gateways, worker):
    (pool, control), (other, _) = gateways.members
    address, _ = await worker("second")
    added = msgspec.json.decode(await control.add({"name": "second", "address": address}), type=WorkerInfo)
    assert (added.state, added.address, added.origin) == ("ready", address, "added")
    assert pool.num_ready == 2
    await eventually(lambda: other.num_ready == 2)
    assert {name: each.unreachable_from for name, each in (await listed(control)).items()} == {
        "first": [],
        "second": [],
    }
    later, _ = gateways.start()
    await eventually(lambda: later.num_ready == 2)


async def test_removed_worker_is_left_by_all_gateways_and_may_come_back(gateways, worker):
    (pool, control), (other, _) = gateways.members
    await control.remove({"name": "first"})
    await eventually(lambda: not pool.links and not other.links)
    assert (await listed(control)) == {}
    later, _ = gateways.start()
    assert not later.links
    await control.add({"name": "first", "address": gateways.configured["first"]})
    assert (await listed(control))["first"].origin == "configured"
    await eventually(lambda: all(each.num_ready == 1 for each, _ in gateways.members))


async def test_gateway_that_does_not_reach_a_worker_is_named(gateways):
    (_, control), _ = gateways.members
    gateways.silent = {"1"}
    assert (await listed(control))["first"].unreachable_from == ["1"]


async def test_address_without_a_listener_is_refused(gateways, tmp_path):
    (pool, control), _ = gateways.members
    with pytest.raises(
        InvalidRequest, match=r"worker x is not added: unix:.*: no process listens at this address"
    ) as refused:
        await control.add({"name": "x", "address": f"unix:{tmp_path}/x.sock"})
    assert refused.value.param == "address"
    assert set(pool.links) == {"first"}


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        (msgspec.structs.replace(FAKE_CARD, processor={"model": "other"}), "model is other at the worker and m at"),
        (msgspec.structs.replace(FAKE_CARD, model="other"), "it serves other, and the others"),
    ],
)
async def test_worker_of_another_model_is_refused_and_left(gateways, worker, card, reason):
    (pool, control), _ = gateways.members
    address, _ = await worker("second", card=card)
    with pytest.raises(InvalidRequest, match=reason):
        await control.add({"name": "second", "address": address})
    assert set(pool.links) == {"first"}


async def test_process_that_speaks_another_protocol_is_refused(gateways, tmp_path):
    async def answer(_reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(answer, f"{tmp_path}/http.sock")
    (_, control), _ = gateways.members
    with pytest.raises(InvalidRequest, match="worker x is not added"):
        await control.add({"name": "x", "address": f"unix:{tmp_path}/http.sock"})
    server.close()


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"name": "first", "address": "unix:/x"}, "name"),
        ({"name": "x"}, "address"),
        ({"name": "x", "address": "y"}, "address"),
    ],
)
async def test_bad_names_and_addresses_are_refused(gateways, parameters, param):
    with pytest.raises(InvalidRequest) as refused:
        await gateways.members[0][1].add(parameters)
    assert refused.value.param == param


async def test_worker_with_requests_is_removed_only_by_force_and_they_move(tmp_path, worker):
    address, _ = await worker("busy", delay_s=30)
    gateways = Gateways(tmp_path, {"busy": address})
    pool, control = gateways.start()
    await eventually(lambda: pool.num_ready == 1)
    remote = pool.links["busy"].submit(EngineRequest("r", ExpandedPrompt([1, 2]), b""))
    with pytest.raises(WorkerInUse, match="worker busy has 1 requests: drain it first"):
        await control.remove({"name": "busy", "force": "false"})
    assert "busy" in pool.links
    await control.remove({"name": "busy", "force": "true"})
    with pytest.raises(WorkerLost):
        [delta async for delta in remote]
    await eventually(lambda: not pool.links)
    await gateways.close()


async def test_unknown_worker_is_answered_with_the_names_of_all(gateways):
    for call in (gateways.members[0][1].remove, gateways.members[0][1].drain):
        with pytest.raises(InvalidRequest, match="no worker named x; the workers are: first"):
            await call({"name": "x"})
