"""Operators list and drain workers, at all gateways of a port. The worker's socket is real."""

import asyncio
import contextlib

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from medialane.gateway import GatewayConfig, WorkerControl, WorkerInfo, WorkerLink, WorkerPool
from medialane.observability import Metrics
from medialane.testing.fake_worker import FakeHandler
from medialane.types.errors import InvalidRequest
from medialane.wire import Hello, RpcConfig
from medialane.worker import RpcServer
from waiting import eventually

RPC = RpcConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=1.0)


class Gateways:
    """Several gateways of a port; the `silent` ones do not answer the others."""

    def __init__(self):
        self.members = []
        self.silent = set()

    def start(self, links):
        """One more of them; return its pool."""
        index = len(self.members)
        pool = WorkerPool(links)

        async def ask_others(path):
            others = {str(number): each for number, (_, each) in enumerate(self.members) if number != index}
            return {
                number: None if number in self.silent else await each.answers[path](path)
                for number, each in others.items()
            }

        self.members.append((pool, WorkerControl(pool, ask_others=ask_others, index=str(index))))
        return pool


@pytest.fixture
async def gateways(tmp_path):
    """Two gateways with one configured worker, to which they are connected."""
    address, gateways = f"unix:{tmp_path}/first.sock", Gateways()
    config, metrics = GatewayConfig(reconnect_initial_s=0.01, reconnect_max_s=0.02), Metrics(CollectorRegistry())
    server = RpcServer(FakeHandler(), RPC)
    await server.serve(address)
    running = []
    for index in range(2):
        hello = Hello(gateway_id=f"g{index}", processor={"model": "m"})
        pool = gateways.start([WorkerLink("first", hello, address=address, rpc=RPC, config=config, metrics=metrics)])
        running.append(asyncio.create_task(pool.run()))
        await eventually(lambda pool=pool: pool.links["first"].client is not None)
    yield gateways
    for task in running:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await server.close()


async def listed(control):
    return {each.name: each for each in msgspec.json.decode(await control.listed({}), type=list[WorkerInfo])}


async def test_worker_that_all_gateways_reach_is_listed_with_its_address(gateways):
    (pool, control), _ = gateways.members
    first = (await listed(control))["first"]
    assert (first.state, first.origin, first.unreachable_from) == ("ready", "configured", [])
    assert first.address == pool.links["first"].address


async def test_gateway_that_does_not_reach_a_worker_is_named(gateways):
    (_, control), _ = gateways.members
    gateways.silent = {"1"}
    assert (await listed(control))["first"].unreachable_from == ["1"]


async def test_unknown_worker_is_answered_with_the_names_of_all(gateways):
    with pytest.raises(InvalidRequest, match="no worker named x; the workers are: first"):
        await gateways.members[0][1].drain({"name": "x"})
