"""Links to workers: connect, reconnect, and whether a worker has mapped this host's arena."""

import asyncio
import contextlib
import socket

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from medialane.gateway import GatewayConfig, WorkerControl, WorkerInfo, WorkerLink, WorkerPool, health_of
from medialane.gateway.workers import RpcClient
from medialane.gateway.workers.pool import on_hosts_of
from medialane.observability import Metrics
from medialane.testing.fake_worker import FAKE_CARD, FakeHandler
from medialane.types.errors import (
    GenerationFailed,
    InvalidRequest,
    NoWorkerReady,
    StartupFailed,
    WorkerBusy,
    WorkerDraining,
    WorkerLost,
    WorkerStalled,
)
from medialane.types.request import EngineRequest, ExpandedPrompt
from medialane.wire import Hello, RpcConfig
from medialane.worker import RpcServer
from waiting import eventually
from written_lines import written_lines

RPC = RpcConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=1.0)


async def num_tokens(remote):
    return sum([len(completion.token_ids) async for delta in remote for completion in delta.completions])


class Net:
    """One address, the links to it, and the servers that were there."""

    def __init__(self, path, registry):
        self.address = f"unix:{path}"
        self.registry = registry
        self.own_arena = None
        self._stack = contextlib.AsyncExitStack()
        self.metrics = Metrics(registry)

    async def serve(self, handler, rpc=RPC):
        server = RpcServer(handler, rpc)
        await server.serve(self.address)
        self._stack.push_async_callback(server.close)
        return server

    def link(self, listener=None, *, config=None, rpc=RPC, **hello):
        config = config or GatewayConfig(reconnect_initial_s=0.01, reconnect_max_s=0.02)
        link = WorkerLink(
            self.address,
            Hello(gateway_id="g", **hello),
            rpc=rpc,
            config=config,
            metrics=self.metrics,
            own_arena=lambda: self.own_arena,
        )
        if listener is not None:
            link.router, listener.link = listener, link
        running = asyncio.create_task(link.run())
        self._stack.push_async_callback(self.end, running)
        return link

    async def connected(self, **hello):
        link = self.link(**hello)
        await eventually(lambda: link.client is not None)
        return link

    async def close(self):
        await self._stack.aclose()

    @staticmethod
    async def end(task):
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def net(tmp_path):
    net = Net(tmp_path / "w.sock", CollectorRegistry())
    yield net
    await net.close()


class Attempts(list):
    """The addresses to which links have tried to connect; connecting to an address in `errors` fails."""

    def __init__(self):
        super().__init__()
        self.errors = {}


@pytest.fixture
def attempts(monkeypatch):
    connect, attempts = RpcClient.connect, Attempts()

    async def recorded(address, hello, config):
        attempts.append(address)
        if address in attempts.errors:
            raise attempts.errors[address]
        return await connect(address, hello, config)

    monkeypatch.setattr(RpcClient, "connect", recorded)
    return attempts


def request(request_id="r", **fields):
    return EngineRequest(request_id, ExpandedPrompt([1, 2]), b"", **fields)


async def test_link_connects_once_the_worker_appears(net, attempts):
    link = net.link()
    await eventually(lambda: len(attempts) > 1)
    assert not link.endpoint().ready
    await net.serve(FakeHandler())
    await eventually(lambda: link.endpoint().ready)


async def test_workers_that_run_are_ready_once_all_addresses_were_tried(net, tmp_path):
    await net.serve(FakeHandler())
    gone = Net(tmp_path / "gone.sock", CollectorRegistry())
    pool = WorkerPool([gone.link(), net.link()])
    async with asyncio.timeout(10):
        await pool.tried(1000)
    assert pool.num_ready == 1
    await gone.close()


async def test_address_that_does_not_answer_is_waited_for_as_long_as_is_said(net):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(net.address.removeprefix("unix:"))
        silent.listen()
        pool = WorkerPool([net.link()])
        async with asyncio.timeout(5):
            await pool.tried(0.05)
        assert not pool.num_ready


async def test_request_without_a_connection_is_refused(net):
    with pytest.raises(WorkerLost):
        net.link().submit(request())


async def test_unserialisable_request_leaves_nothing_in_flight(net):
    await net.serve(FakeHandler())
    link = await net.connected()
    with pytest.raises(OverflowError):
        link.submit(request(priority=1 << 70))
    assert len(link.client.requests) == 0


async def test_duplicate_request_id_is_refused_and_the_first_continues(net):
    await net.serve(FakeHandler(delay_s=0.01, token_ids=range(3)))
    link = await net.connected()
    remote = link.submit(request())
    with pytest.raises(GenerationFailed):
        link.submit(request())
    assert await num_tokens(remote) == 3
    await eventually(lambda: len(link.client.requests) == 0)


async def test_lost_worker_is_counted(net):
    server = await net.serve(FakeHandler(delay_s=0.01, token_ids=range(1000)))
    link = await net.connected()
    remote = link.submit(request())
    await eventually(lambda: server.num_in_flight == 1)
    await server.close()
    await eventually(lambda: link.client is None)
    with pytest.raises(WorkerLost):
        await num_tokens(remote)
    value = net.registry.get_sample_value
    await eventually(lambda: value("medialane_worker_losses_total", {"worker": net.address}) == 1)


async def test_cancelled_link_disconnects_and_ends_its_requests(net):
    server = await net.serve(FakeHandler(delay_s=0.01, token_ids=range(1000)))
    config = GatewayConfig()
    link = WorkerLink(net.address, Hello(gateway_id="g"), rpc=RPC, config=config, metrics=Metrics(CollectorRegistry()))
    running = asyncio.create_task(link.run())
    await eventually(lambda: link.client is not None)
    client = link.client
    link.submit(request())
    await eventually(lambda: server.num_in_flight == 1)
    await net.end(running)
    assert client.closed.is_set()
    await eventually(lambda: server.num_in_flight == 0)


async def test_rejection_is_logged_once_and_kept(net, caplog):
    handler = FakeHandler(refusal=StartupFailed("another model"))
    await net.serve(handler)
    link = net.link()
    await eventually(lambda: len(handler.hellos) > 2)
    assert link.refusal.message == "another model"
    assert written_lines(caplog.records).count("refuses this gateway") == 1


async def test_differing_settings_are_listed_by_name(net, caplog):
    await net.serve(FakeHandler())
    link = await net.connected(processor={"model": "ours"})
    assert not link.same_processor
    assert "processor setting model is None there and ours here" in caplog.text


@pytest.mark.parametrize(
    ("own", "theirs", "is_same"), [("a", "a", True), ("a", "b", False), ("a", None, False), (None, None, False)]
)
async def test_same_host_requires_that_both_have_mapped_one_arena(net, own, theirs, is_same):
    handler, net.own_arena = FakeHandler(), own
    handler.map_arena(theirs)
    await net.serve(handler)
    heard = Heard()
    link = net.link(heard)
    await eventually(lambda: heard.held is not None and (theirs is None or link.client.reports.arena == theirs))
    assert (link.same_host, link.endpoint().same_host) == (is_same, is_same)
    assert link.same_processor


async def test_listener_is_notified_when_the_worker_maps_or_unmaps_an_arena(net):
    handler, heard, net.own_arena = FakeHandler(), Heard(), "a"
    await net.serve(handler)
    link = net.link(heard)
    await eventually(lambda: heard.held is not None)
    assert not link.same_host
    for arena in ("a", None):
        handler.map_arena(arena)
        await eventually(lambda expected=arena is not None: link.same_host is expected)
    await eventually(lambda: heard.moves[-2:] == [True, False])


async def test_listener_is_notified_when_this_gateway_has_another_store(net):
    handler, heard, net.own_arena = FakeHandler(), Heard(), "a"
    handler.map_arena("a")
    server = await net.serve(handler)
    link = net.link(heard)
    pool = WorkerPool([link])
    await eventually(lambda: heard.held is not None and link.same_host)
    del heard.moves[:]
    for net.own_arena in ("b", None, "a"):
        pool.arena_changed()
    assert heard.moves == [False, False, True]
    await server.close()
    await eventually(lambda: heard.held is None)
    pool.arena_changed()
    assert len(heard.moves) == 3, "the worker is lost"


async def test_pool_counts_ready_workers(net, tmp_path):
    await net.serve(FakeHandler())
    config, metrics = GatewayConfig(), Metrics(CollectorRegistry())
    addresses = [net.address, f"unix:{tmp_path}/missing.sock"]
    pool = WorkerPool(
        [WorkerLink(a, Hello(gateway_id="g"), rpc=RPC, config=config, metrics=metrics) for a in addresses]
    )
    running = asyncio.create_task(pool.run())
    await eventually(lambda: pool.num_ready == 1)
    assert [(e.worker_id, e.ready) for e in pool.endpoints()] == [(addresses[0], True), (addresses[1], False)]
    await net.end(running)
    assert pool.num_ready == 0


async def test_neither_a_request_nor_a_load_report_walks_the_links(net):
    class Unwalkable(dict):
        def values(self):
            raise AssertionError("with a thousand workers there is no time for that")

    heard = Heard()
    await net.serve(FakeHandler())
    pool = WorkerPool([net.link(heard)])
    await eventually(lambda: pool.num_ready == 1)
    assert pool.encoder == ""
    pool.links = Unwalkable(pool.links)
    num_reports = heard.num_reports
    await eventually(lambda: heard.num_reports > num_reports + 2)
    pool.check_ready()
    assert (pool.num_ready, pool.encoder) == (1, "")


async def test_worker_lost_without_a_listener_is_not_ready(net):
    server = await net.serve(FakeHandler())
    pool = WorkerPool([net.link()])
    await eventually(lambda: pool.num_ready == 1)
    await server.close()
    await eventually(lambda: pool.num_ready == 0)
    with pytest.raises(NoWorkerReady):
        pool.check_ready()


async def test_requests_sent_to_a_stalled_worker_move_at_its_next_report(net, tmp_path):
    handler = FakeHandler(delay_s=30)
    await net.serve(handler)
    link = net.link()
    other = FakeHandler()
    server = RpcServer(other, RPC)
    await server.serve(f"unix:{tmp_path}/other.sock")
    beside = WorkerLink(
        f"unix:{tmp_path}/other.sock", Hello(gateway_id="g"), rpc=RPC, config=GatewayConfig(), metrics=net.metrics
    )
    pool = WorkerPool([link, beside])
    running = asyncio.create_task(beside.run())
    try:
        await eventually(lambda: pool.num_ready == 2)
        handler.is_stalled = True
        await eventually(lambda: link.state == "stalled")
        remote = link.submit(request("late"))  # chosen before the worker was known to be stalled
        with pytest.raises(WorkerStalled):
            await num_tokens(remote)
    finally:
        await net.end(running)
        await server.close()


async def test_pool_waits_for_the_card_of_the_first_worker(net):
    pool = WorkerPool([net.link()])
    waiting = asyncio.create_task(pool.first_card())
    await asyncio.sleep(0.05)  # time: for attempts to connect
    assert not waiting.done()
    await net.serve(FakeHandler(card=msgspec.structs.replace(FAKE_CARD, tasks=("embed",))))
    assert (await waiting).tasks == ("embed",)
    assert (await pool.first_card()).tasks == ("embed",)


async def test_full_worker_rejects(net):
    await net.serve(FakeHandler(delay_s=0.01, token_ids=range(1000)))
    link = await net.connected(rpc=RpcConfig(max_in_flight=1))
    link.submit(request("a"))
    remote = link.submit(request("b"))
    with pytest.raises(WorkerBusy):
        await anext(remote)
    assert len(link.client.requests) == 1


class Heard:
    """A router's notifications about one worker, and its view of the blocks."""

    def __init__(self):
        self.calls = []
        self.moves = []  # link.same_host
        self.held = None
        self.num_reports = 0

    def join(self, endpoint):
        self.calls.append(("joined", endpoint.rank, endpoint.num_ranks, endpoint.ready))
        self.held = set()
        return endpoint.rank

    def leave(self, slot):
        self.calls.append(("left", self.link.name))
        self.held = None

    def report(self, slot, load):
        self.num_reports += 1
        if self.calls[-1][:2] != ("reported", slot):
            self.calls.append(("reported", slot, load.num_running))

    def drain(self, slot, *, draining):
        self.calls.append(("draining", draining))

    def move(self, slot, *, same_host):
        self.moves.append(same_host)

    def change(self, slot, change):
        known = set() if change.snapshot else self.held - ids(change.removed)
        self.held = known | ids(change.stored)


def ids(data):
    return set(np.frombuffer(data, "<u8").tolist())


async def test_listener_is_notified_of_joins_blocks_and_leaves(net):
    handler, heard = FakeHandler(), Heard()
    handler.change_blocks([1, 2])
    server = await net.serve(handler)
    net.link(heard)
    await eventually(lambda: heard.held == {1, 2})
    handler.change_blocks([3], [1])
    await eventually(lambda: heard.held == {2, 3})
    await eventually(lambda: heard.calls[-1] == ("reported", 0, 0))
    await server.close()
    await eventually(lambda: heard.calls[-1] == ("left", net.address))
    assert heard.calls == [("joined", 0, 1, True), ("reported", 0, 0), ("left", net.address)]


async def test_stalled_worker_is_connected_but_not_ready_and_its_listener_is_notified(net):
    handler, heard = FakeHandler(), Heard()
    await net.serve(handler)
    link = net.link(heard)
    pool = WorkerPool([link])
    await eventually(lambda: pool.num_ready == 1)
    handler.is_stalled = True
    await eventually(lambda: ("draining", True) in heard.calls)
    assert (pool.num_ready, link.state) == (0, "stalled")
    assert [(e.ready, e.state) for e in pool.endpoints()] == [(True, "stalled")]
    handler.is_stalled = False
    await eventually(lambda: ("draining", False) in heard.calls)
    assert (pool.num_ready, pool.endpoints()[0].state) == (1, "ready")


async def test_operator_drains_a_worker_which_then_takes_no_requests(net):
    handler, heard = FakeHandler(), Heard()
    server = await net.serve(handler)
    pool = WorkerPool([link := net.link(heard)])
    await eventually(lambda: pool.num_ready == 1)
    control = WorkerControl(pool)
    (listed,) = msgspec.json.decode(await control.listed({}), type=list[WorkerInfo])
    drained = msgspec.json.decode(await control.drain({"name": net.address}), type=WorkerInfo)
    assert listed == drained
    assert (drained.name, drained.state, drained.run) == (net.address, "ready", link.client.welcome.worker_id)
    await eventually(lambda: ("draining", True) in heard.calls)
    assert (pool.num_ready, pool.endpoints()[0].state) == (0, "draining")
    with pytest.raises(WorkerDraining):
        await num_tokens(link.submit(EngineRequest("late", ExpandedPrompt([1]), b"")))
    await server.close()
    await eventually(lambda: link.state == "lost")
    with pytest.raises(NoWorkerReady):
        await control.drain({"name": net.address})
    assert not net.registry.get_sample_value("medialane_worker_losses_total", {"worker": net.address})


async def test_unknown_worker_cannot_be_drained(net):
    pool = WorkerPool([net.link()])
    with pytest.raises(InvalidRequest, match=f"no worker named x; the workers are: {net.address}"):
        await WorkerControl(pool).drain({"name": "x"})


async def test_worker_whose_blocks_are_unknown_is_ready(net):
    handler = FakeHandler()
    handler.has_unknown_blocks = True
    await net.serve(handler)
    link = net.link(Heard())
    await eventually(lambda: link.client is not None and link.client.reports.has_unknown_blocks)
    assert link.is_ready


async def test_pool_knows_when_a_worker_is_expected(net):
    pool = WorkerPool([net.link(Heard())])
    assert pool.retry_after_s == 1
    await asyncio.sleep(1.2)  # time: of the outage, which is expected to last as long again
    assert pool.retry_after_s == 2
    server = await net.serve(FakeHandler())
    await eventually(lambda: pool.num_ready == 1)
    assert pool.retry_after_s == 1
    await server.close()
    await eventually(lambda: pool.num_ready == 0)
    assert pool.retry_after_s == 2, "as long as the last one"


async def test_encoder_is_connected_but_neither_a_candidate_nor_ready_for_requests(net):
    heard = Heard()
    server = await net.serve(FakeHandler(card=msgspec.structs.replace(FAKE_CARD, role="encoder")))
    link = net.link(heard)
    pool = WorkerPool([link])
    await eventually(lambda: link.client is not None)
    await eventually(lambda: link.client.reports.loads)  # all that a worker reports at once has arrived
    assert (pool.num_ready, pool.of_role("worker"), pool.of_role("encoder")) == (0, [], [link])
    assert (link.endpoint().role, link.endpoint().ready) == ("encoder", True)
    await server.close()
    await eventually(lambda: link.client is None)
    assert (link.endpoint().role, link.endpoint().ready) == ("encoder", False)
    assert pool.of_role("encoder") == [link]
    assert heard.calls == []


REPORTED = [("reported", 0, 3), ("reported", 1, 0)]


async def test_load_is_reported_per_rank(net):
    card = msgspec.structs.replace(FAKE_CARD, data_parallel_size=2)
    handler, heard = FakeHandler(card=card), Heard()
    handler.num_active = 3
    await net.serve(handler)
    link = net.link(heard)
    await eventually(lambda: [call for call in heard.calls if call[0] == "reported"][:2] == REPORTED)
    assert [endpoint.load.num_running for endpoint in link.endpoints()] == [3, 0]
    handler.num_active = 0


async def test_returning_worker_rejoins_with_its_current_blocks(net):
    heard = Heard()
    server = await net.serve(FakeHandler())
    net.link(heard)
    await eventually(lambda: heard.held == set())
    await server.close()
    await eventually(lambda: heard.held is None)
    again = FakeHandler()
    again.change_blocks([9])
    await net.serve(again)
    await eventually(lambda: heard.held == {9})
    assert [what for what, *_ in heard.calls if what != "reported"] == ["joined", "left", "joined"]


async def test_listener_is_notified_when_the_gateway_drops_a_worker(net):
    heard = Heard()
    await net.serve(FakeHandler())
    net.link(heard)
    await eventually(lambda: heard.held == set())
    await net.close()
    assert heard.calls[-1] == ("left", net.address)


async def test_every_rank_of_a_worker_is_an_endpoint(net):
    card = msgspec.structs.replace(FAKE_CARD, data_parallel_size=3)
    await net.serve(FakeHandler(card=card))
    link = await net.connected()
    found = link.endpoints()
    assert [(e.rank, e.num_ranks) for e in found] == [(0, 3), (1, 3), (2, 3)]
    assert all(e.ready and e.card == card and not e.same_host for e in found)


async def test_lost_worker_is_one_endpoint_that_is_not_ready(net):
    link = net.link()
    assert [(e.ready, e.card) for e in link.endpoints()] == [(False, None)]


class Flawed(Heard):
    """Fails at the first workers that join."""

    def __init__(self, num_failures):
        super().__init__()
        self.num_failures = num_failures

    def join(self, endpoint):
        slot = super().join(endpoint)
        if self.num_failures:
            self.num_failures -= 1
            raise ValueError("no room for another")
        return slot


async def test_failing_link_is_logged_once_and_retried(net, caplog):
    await net.serve(FakeHandler())
    heard = Flawed(3)
    link = net.link(heard)
    await eventually(lambda: link.is_failing)
    assert link.client is None
    await eventually(lambda: link.client is not None and not heard.num_failures)
    assert not link.is_failing
    assert [what for what, *_ in heard.calls if what != "reported"] == ["joined"] * 4
    assert written_lines(caplog.records).count("its link failed and is restarted") == 1
    assert "no room for another" in caplog.text


@pytest.mark.parametrize("error", [UnicodeError("label empty"), RuntimeError("a bug"), KeyError("w"), OSError("?")])
async def test_exception_in_one_link_leaves_the_others_serving(net, attempts, error, caplog):
    handler = FakeHandler()
    await net.serve(handler)
    attempts.errors["tcp://a..b:7000"] = error
    config = GatewayConfig(reconnect_initial_s=0.01, reconnect_max_s=0.02)
    links = [
        WorkerLink(a, Hello(gateway_id="g"), rpc=RPC, config=config, metrics=Metrics(CollectorRegistry()))
        for a in ("tcp://a..b:7000", net.address)
    ]
    pool = WorkerPool(links)
    running = asyncio.create_task(pool.run())
    await eventually(lambda: attempts.count("tcp://a..b:7000") > 3 and pool.num_ready == 1)
    assert await num_tokens(links[1].submit(request())) == 3
    assert not running.done()
    assert (health_of(pool).response()[0], pool.num_failing) == (200, 1)
    assert "worker tcp://a..b:7000: its link failed" in caplog.text
    await net.end(running)


async def test_invalid_address_fails_only_its_link(net, attempts, caplog):
    config = GatewayConfig(reconnect_initial_s=0.01, reconnect_max_s=0.02)
    hello, metrics = Hello(gateway_id="g"), Metrics(CollectorRegistry())
    link = WorkerLink("tcp://a..b:7000", hello, rpc=RPC, config=config, metrics=metrics)
    running = asyncio.create_task(link.run())
    await eventually(lambda: link.is_failing and len(attempts) > 2)
    assert written_lines(caplog.records).count("'a..b' is not a host name or IP address") == 1
    await net.end(running)


async def test_worker_that_disconnects_immediately_is_retried_with_backoff(net):
    handler = FakeHandler()
    await net.serve(handler)
    pauses = []
    link = net.link(config=GatewayConfig(reconnect_initial_s=0.05, reconnect_max_s=0.2))
    for _ in range(4):
        await eventually(lambda: link.client is not None)
        link.client.leave()
        await eventually(lambda: link.client is None)
        started = asyncio.get_running_loop().time()
        await eventually(lambda: link.client is not None)
        pauses.append(asyncio.get_running_loop().time() - started)
    assert pauses[-1] >= 0.15


async def test_router_drops_a_worker_in_the_iteration_of_its_connection_loss(net):
    heard, server = Heard(), await net.serve(FakeHandler())
    link = net.link(heard)
    await eventually(lambda: link.client is not None and heard.held is not None)
    client, seen = link.client, []
    heard.leave = lambda _slot: seen.append(client.closed.is_set())
    client.connection.end(WorkerLost("the network is broken"))
    await client.closed.wait()
    assert seen == [True]
    await server.close()


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ("tcp://10.0.0.1:7001", {"tcp://10.0.0.1:7001", "tcp://10.0.0.1:7002"}),
        ("tcp://[fe80::1]:7001", {"tcp://[fe80::1]:7001", "tcp://[fe80::1]:7002"}),
        ("unix:/run/worker-0", {"unix:/run/worker-0"}),
        ("joined", {"joined"}),
    ],
)
def test_workers_that_may_be_lost_with_another_are_those_of_its_tcp_host(lost, expected):
    workers = [f"tcp://{host}:{port}" for host in ("10.0.0.1", "10.0.0.10", "[fe80::1]") for port in (7001, 7002)]
    workers += ["unix:/run/worker-0", "unix:/run/worker-1", "joined", "joined-2"]
    addresses = {name: name if ":" in name else "" for name in workers}
    assert on_hosts_of([lost], addresses) == expected
