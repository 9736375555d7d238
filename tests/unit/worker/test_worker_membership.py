"""Which gateways a worker is connected to: names are resolved by a scripted resolver, connections are scripted."""

import asyncio
import contextlib
import logging
from random import Random

import pytest

from medialane.types.errors import AlreadyJoined, AuthenticationFailed, NoWorkerReady, StartupFailed, WorkerLost
from medialane.wire import Hello, TcpAddress
from medialane.worker import WorkerConfig
from medialane.worker.serve import Delays, Membership, resolve
from waiting import eventually, iterations
from written_lines import written_lines

NAME = TcpAddress("gateways.example", 7100)


class Network:
    """The DNS, and the gateways that accept connections, each until `drop`."""

    def __init__(self):
        self.addresses = {NAME.host: ["10.0.0.1"]}
        self.ports = [7100]
        self.open = {}
        self.attempts = []
        self.refusal = None
        self.down = set()
        self.num_lookups = 0
        self.resolve_now = None

    async def resolve(self, host):
        self.num_lookups += 1
        if self.resolve_now is not None:
            await self.resolve_now(host)
        found = self.addresses[host]
        if isinstance(found, OSError):
            raise found
        return found

    async def connect(self, address, *, on_hello):
        self.attempts.append(address)
        if address in self.down:
            raise NoWorkerReady("no process listens there")
        if self.refusal is not None:
            raise self.refusal
        assert address not in self.open, "connected twice"
        self.open[address] = asyncio.Event()
        on_hello(Hello(gateway_id=address, join_ports=self.ports))
        try:
            await self.open[address].wait()
        finally:
            del self.open[address]

    def drop(self, address):
        self.open[address].set()


QUICK = {"initial_s": 0.01, "max_s": 0.02, "min_resolve_interval_s": 0.01}


@pytest.fixture
async def net():
    net = Network()
    async with contextlib.AsyncExitStack() as stack:

        def start(*names, interval_s=0.02, refused_s=30.0, **delays):
            config = WorkerConfig(join_resolve_interval_s=interval_s, join_refused_interval_s=refused_s)
            membership = Membership(
                *(names or (NAME,), net.connect),
                config=config,
                resolve=net.resolve,
                delays=Delays(**{**QUICK, **delays}),
            )
            running = asyncio.create_task(membership.run())
            stack.push_async_callback(_cancelled, running)

        net.start = start
        yield net


async def _cancelled(task):
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def addresses(*hosts, port=7100):
    return {f"tcp://{host}:{port}" for host in hosts}


async def test_every_address_of_every_name_is_joined(net):
    net.addresses |= {NAME.host: ["10.0.0.1", "10.0.0.2"], "other.example": ["fd00::1"]}
    net.start(NAME, TcpAddress("other.example", 7200))
    expected = {*addresses("10.0.0.1", "10.0.0.2"), "tcp://[fd00::1]:7200"}
    await eventually(lambda: set(net.open) >= expected)


async def test_address_that_appears_is_joined_and_connections_stay(net):
    net.start()
    await eventually(lambda: set(net.open) == addresses("10.0.0.1"))
    net.addresses[NAME.host] = ["10.0.0.1", "10.0.0.2"]
    await eventually(lambda: set(net.open) == addresses("10.0.0.1", "10.0.0.2"))
    assert net.attempts.count("tcp://10.0.0.1:7100") == 1


async def test_other_gateways_of_the_host_are_joined(net):
    net.ports = [7100, 7101, 7102]
    net.start()
    await eventually(lambda: set(net.open) == {f"tcp://10.0.0.1:{port}" for port in net.ports})


async def test_any_gateway_that_is_named_tells_of_the_others_of_its_host(net):
    net.ports, net.down = [7100, 7101, 7102], {"tcp://10.0.0.1:7100"}
    net.start(NAME, TcpAddress(NAME.host, 7101))
    await eventually(lambda: set(net.open) == {"tcp://10.0.0.1:7101", "tcp://10.0.0.1:7102"})
    net.down.clear()
    await eventually(lambda: set(net.open) == {f"tcp://10.0.0.1:{port}" for port in net.ports})


async def test_lost_gateway_is_joined_again(net):
    net.start()
    for _ in range(3):
        await eventually(lambda: net.open)
        net.drop("tcp://10.0.0.1:7100")
        await eventually(lambda: not net.open)
    await eventually(lambda: net.open)


async def test_address_that_vanished_is_left_when_its_connection_ends(net):
    net.addresses[NAME.host] = ["10.0.0.1", "10.0.0.2"]
    net.start()
    await eventually(lambda: len(net.open) == 2)
    net.addresses[NAME.host] = ["10.0.0.2"]
    before = net.num_lookups
    await eventually(lambda: net.num_lookups > before + 2)
    assert set(net.open) == addresses("10.0.0.1", "10.0.0.2"), "no connection ends because of the DNS"
    net.drop("tcp://10.0.0.1:7100")
    before = net.num_lookups
    await eventually(lambda: net.num_lookups > before + 2)
    num_attempts = net.attempts.count("tcp://10.0.0.1:7100")
    before = net.num_lookups
    await eventually(lambda: net.num_lookups > before + 5)
    assert net.attempts.count("tcp://10.0.0.1:7100") == num_attempts
    net.addresses[NAME.host] = ["10.0.0.1", "10.0.0.2"]
    await eventually(lambda: set(net.open) == addresses("10.0.0.1", "10.0.0.2"))


async def test_loss_resolves_the_name_again_before_the_interval(net):
    net.start(interval_s=3600.0)
    await eventually(lambda: net.open)
    net.addresses[NAME.host] = ["10.0.0.2"]
    net.drop("tcp://10.0.0.1:7100")
    await eventually(lambda: set(net.open) == addresses("10.0.0.2"))


async def test_last_addresses_count_while_the_name_cannot_be_resolved(net, caplog):
    net.start()
    await eventually(lambda: net.open)
    net.addresses[NAME.host] = OSError(-3, "temporary failure in name resolution")
    before = net.num_lookups
    await eventually(lambda: net.num_lookups > before + 3)
    net.drop("tcp://10.0.0.1:7100")
    await eventually(lambda: len(net.attempts) == 2 and net.open)
    assert (
        written_lines(caplog.records).count("gateways.example cannot be resolved: temporary failure in name resolution")
        == 1
    )


async def test_name_that_is_unknown_at_first_is_joined_later(net):
    net.addresses[NAME.host] = OSError(-2, "name or service not known")
    net.start()
    await eventually(lambda: net.num_lookups > 2)
    net.addresses[NAME.host] = ["10.0.0.1"]
    await eventually(lambda: net.open)


@pytest.mark.parametrize("refusal", [StartupFailed("model is a at the worker and b at the gateway"), AlreadyJoined("")])
async def test_refused_worker_waits_before_it_tries_again(net, refusal):
    net.refusal = refusal
    net.start()
    await eventually(lambda: net.attempts)
    before = net.num_lookups
    await eventually(lambda: net.num_lookups > before + 5)
    assert len(net.attempts) == 1


@pytest.mark.parametrize("gateway", [NAME, TcpAddress("10.0.0.1", 7100)])
async def test_refusal_is_logged_once_and_may_end(net, caplog, gateway):
    net.addresses["10.0.0.1"] = ["10.0.0.1"]
    net.refusal = StartupFailed("another model")
    net.start(gateway, refused_s=0.01)
    await eventually(lambda: len(net.attempts) > 3)
    assert written_lines(caplog.records).count("tcp://10.0.0.1:7100 refuses this worker: another model") == 1
    net.refusal = None
    await eventually(lambda: net.open)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NoWorkerReady("x"), "no process listens there"),
        (WorkerLost("cut"), "cut"),
        (AuthenticationFailed("another secret"), "another secret"),
    ],
)
async def test_gateway_that_may_soon_be_reachable_is_tried_again_and_logged_once(net, caplog, error, text):
    caplog.set_level(logging.INFO)
    net.refusal = error
    net.start()
    await eventually(lambda: len(net.attempts) > 3)
    assert written_lines(caplog.records).count(text) == 1
    net.refusal = None
    await eventually(lambda: net.open)


async def test_bug_in_one_connection_does_not_end_the_others(net, caplog):
    net.refusal = RuntimeError("bug")
    net.start()
    await eventually(lambda: len(net.attempts) > 1)
    assert "joining failed" in caplog.text
    net.refusal = None
    await eventually(lambda: net.open)


async def test_resolver_that_does_not_respond_does_not_prevent_a_reconnection(net):
    net.start(resolve_wait_s=0.05)
    await eventually(lambda: net.open)

    async def hang(_host):
        await asyncio.Event().wait()

    net.resolve_now = hang
    net.drop("tcp://10.0.0.1:7100")
    await eventually(lambda: len(net.attempts) == 2 and net.open)


async def test_failing_gateway_causes_no_flood_of_lookups(net):
    net.refusal = WorkerLost("down")
    net.start(interval_s=3600.0, min_resolve_interval_s=5.0, resolve_wait_s=0.01)
    await eventually(lambda: len(net.attempts) > 10)
    await iterations(10)
    assert net.num_lookups == 1


class EndpointSlices:
    """The headless Service of gateways, as the DNS of a cluster answers for it: all endpoints of its slices, each of up
    to 100, also those that are not ready (publishNotReadyAddresses)."""

    def __init__(self, num_endpoints):
        self._number = 0
        self.slices = []
        self.add(num_endpoints)

    def add(self, num_endpoints):
        for _ in range(num_endpoints):
            if not self.slices or len(self.slices[-1]["endpoints"]) == 100:
                self.slices.append({"addressType": "IPv4", "endpoints": []})
            self._number += 1
            address = f"10.1.{self._number // 250}.{self._number % 250 + 1}"
            self.slices[-1]["endpoints"].append({"addresses": [address], "conditions": {"ready": False}})

    def remove(self, num_endpoints, random):
        """Random ones, wherever their slices are; an empty slice is deleted. Return their addresses."""
        removed = random.sample([each for found in self.slices for each in found["endpoints"]], num_endpoints)
        for found in self.slices:
            found["endpoints"] = [each for each in found["endpoints"] if each not in removed]
        self.slices = [found for found in self.slices if found["endpoints"]]
        return [address for each in removed for address in each["addresses"]]

    def addresses(self):
        return [address for found in self.slices for each in found["endpoints"] for address in each["addresses"]]


async def test_worker_follows_200_endpoints_that_come_and_go(net):
    random = Random(43)
    service = EndpointSlices(200)
    net.addresses[NAME.host] = service.addresses()
    net.start()
    await eventually(lambda: set(net.open) == addresses(*service.addresses()))
    for _ in range(10):
        gone = service.remove(50, random)
        service.add(50)
        net.addresses[NAME.host] = service.addresses()
        net.down |= addresses(*gone)
        for address in addresses(*gone):  # a pod's connections may end before its endpoint is gone from the DNS
            net.drop(address)
        await eventually(lambda: set(net.open) == addresses(*service.addresses()))
    looked_up = net.num_lookups
    await eventually(lambda: net.num_lookups > looked_up + 2)
    tried, looked_up = len(net.attempts), net.num_lookups
    await eventually(lambda: net.num_lookups > looked_up + 5)
    assert len(net.attempts) == tried, "addresses that are gone are not tried"
    assert {net.attempts.count(address) for address in net.open} == {1}, "gateways that stay are not joined again"


async def test_addresses_are_resolved_without_duplicates():
    assert await resolve("127.0.0.1") == ["127.0.0.1"]
    assert await resolve("::1") == ["::1"]
