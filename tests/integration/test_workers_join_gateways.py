"""Workers that join gateways: membership at the worker, links at the gateway, sockets between them."""

import asyncio
import contextlib
import signal
import sys

import msgspec
import pytest
from joined_gateway import PROCESSOR, RPC, Gateway
from prometheus_client import generate_latest

from medialane.gateway import GatewayConfig, health_of
from medialane.testing.fake_worker import FAKE_CARD, FakeHandler
from medialane.types.errors import WorkerLost
from medialane.types.request import EngineRequest, ExpandedPrompt
from medialane.wire import Join, TcpAddress
from medialane.worker import RpcServer, WorkerConfig
from medialane.worker.serve import Membership
from waiting import eventually

CARD = msgspec.structs.replace(FAKE_CARD, processor=PROCESSOR)

#: A loss is detected within 0.9 s by default (test_wire_config.py); on a busy machine this process may see it later.
LOSS_S = 2.0

WORKER_PROGRAM = """
import sys
from medialane.cli.main import main
sys.exit(main(["worker", "m", "--engine", "simulated", "--worker-name", sys.argv[1], "--join", sys.argv[2],
               *sys.argv[3:]]))
"""


class Proxy:
    """Forwards TCP connections to `port`; while it is `cut`, bytes are lost and no side is notified."""

    def __init__(self, port):
        self._target = port
        self._tasks = set()
        self._writers = []
        self.cut = False

    async def start(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def _accept(self, reader, writer):
        self._writers.append(writer)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers.append(far_writer)
        self._tasks |= {asyncio.create_task(self._pump(*ends)) for ends in ((reader, far_writer), (far_reader, writer))}

    async def _pump(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if not self.cut:
                    writer.write(data)
        if not self.cut:
            writer.close()

    async def close(self):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)


class Cluster:
    def __init__(self, stack):
        self._stack = stack

    async def gateway(self, *, rpc=RPC, **settings):
        gateway = await Gateway(GatewayConfig(**settings) if settings else None, rpc).start()
        self._stack.push_async_callback(lambda: gateway.close())
        return gateway

    async def proxy(self, gateway):
        proxy = await Proxy(gateway.port).start()
        self._stack.push_async_callback(proxy.close)
        return proxy

    async def worker(self, name, *ports, card=CARD, worker_id=None, **config):
        """Join the gateways at these ports of this host."""
        handler = FakeHandler(card=card, worker_id=worker_id or f"id of {name}", delay_s=0.01)
        server = RpcServer(handler, RPC)
        join = Join(name=name, worker_id=worker_id or f"id of {name}", card=card)
        membership = Membership(
            [TcpAddress("127.0.0.1", port) for port in ports],
            lambda address, on_hello: server.join(address, join, on_hello=on_hello),
            config=WorkerConfig(join_resolve_interval_s=0.05, **config),
        )
        running = asyncio.create_task(membership.run())

        async def close():
            running.cancel()
            await asyncio.wait([running])
            await server.close()

        self._stack.push_async_callback(close)
        server.handler, server.leave = handler, close
        return server

    async def process(self, name, port, *flags):
        """A simulated worker in a process of its own."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WORKER_PROGRAM, name, f"127.0.0.1:{port}", *flags
        )
        self._stack.push_async_callback(self._kill, process)
        return process

    @staticmethod
    async def _kill(process):
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
async def cluster():
    async with contextlib.AsyncExitStack() as stack:
        yield Cluster(stack)


def request(request_id="r"):
    return EngineRequest(request_id, ExpandedPrompt([1, 2]), b"")


async def tokens(remote):
    return [token async for delta in remote for completion in delta.completions for token in completion.token_ids]


async def test_worker_serves_two_gateways(cluster):
    gateways = [await cluster.gateway() for _ in range(2)]
    worker = await cluster.worker("w", *(gateway.port for gateway in gateways))
    for gateway in gateways:
        await eventually(lambda gateway=gateway: gateway.ready == {"w"})
        assert await tokens(gateway.pool.links["w"].submit(request(gateway.address))) == [1, 2, 3]
    assert worker.num_gateways == 2
    assert [health_of(gateway.pool).status for gateway in gateways] == ["ok", "ok"]


async def test_all_gateways_of_a_host_get_a_worker_that_knows_one(cluster):
    first, second = Gateway(), Gateway()
    for gateway in (first, second):  # to know the ports
        await gateway.start()
        await gateway.close()
    for gateway in (first, second):
        gateway.ports = [first.port, second.port]
        await gateway.start()
    await cluster.worker("w", first.port)
    await eventually(lambda: first.ready == second.ready == {"w"})
    await first.close()
    await second.close()


async def test_restarted_gateway_gets_its_workers_back(cluster):
    gateway = await cluster.gateway()
    for name in ("a", "b"):
        await cluster.worker(name, gateway.port)
    await eventually(lambda: gateway.ready == {"a", "b"})
    await gateway.close()
    await gateway.start()
    await eventually(lambda: gateway.ready == {"a", "b"})


async def test_gateway_that_is_cut_off_loses_the_worker_soon_and_others_keep_it(cluster):
    near, far = await cluster.gateway(), await cluster.gateway()
    proxy = await cluster.proxy(far)
    worker = await cluster.worker("w", near.port, proxy.port)
    await eventually(lambda: near.ready == far.ready == {"w"})
    proxy.cut = True
    await eventually(lambda: not far.ready and worker.num_gateways == 1, timeout_s=LOSS_S)
    assert near.ready == {"w"}
    assert (near.problems(), far.problems()) == ((), ("0 of 1 workers are ready",))
    assert b'medialane_worker_state{state="lost",worker="w"} 1.0' in generate_latest(far.registry)
    assert b'medialane_worker_state{state="ready",worker="w"} 1.0' in generate_latest(near.registry)
    proxy.cut = False
    await eventually(lambda: far.ready == {"w"})


async def test_stopped_worker_is_lost_soon_and_returns(cluster):
    gateway = await cluster.gateway(forget_worker_s=60.0)
    process = await cluster.process("w", gateway.port)
    await eventually(lambda: gateway.ready == {"w"}, timeout_s=30.0)
    process.send_signal(signal.SIGSTOP)
    await eventually(lambda: not gateway.ready, timeout_s=LOSS_S)
    process.send_signal(signal.SIGCONT)
    await eventually(lambda: gateway.ready == {"w"})


async def test_workers_of_one_process_join_under_names_of_their_own(cluster):
    gateway = await cluster.gateway()
    process = await cluster.process("w", gateway.port, "--simulated-workers", "3")
    await eventually(lambda: gateway.ready == {"w", "w/1", "w/2"}, timeout_s=30.0)
    process.terminate()
    await eventually(lambda: not gateway.ready)
    assert await process.wait() == 0


async def test_worker_that_left_is_reported_as_lost_and_then_forgotten(cluster):
    gateway = await cluster.gateway(forget_worker_s=0.3)
    await cluster.worker("stays", gateway.port)
    worker = await cluster.worker("leaves", gateway.port)
    await eventually(lambda: gateway.ready == {"stays", "leaves"})
    await worker.leave()
    await eventually(lambda: gateway.problems() == ("1 of 2 workers are ready",))
    await eventually(lambda: gateway.problems() == ())
    assert set(gateway.pool.links) == {"stays"}
    assert b"leaves" not in generate_latest(gateway.registry)


async def test_restarted_worker_of_the_same_name_is_used(cluster):
    gateway = await cluster.gateway(forget_worker_s=60.0)
    worker = await cluster.worker("w", gateway.port, worker_id="first")
    await eventually(lambda: gateway.ready == {"w"})
    await worker.leave()
    await cluster.worker("w", gateway.port, worker_id="second")
    await eventually(lambda: gateway.ready and gateway.pool.links["w"].client.welcome.worker_id == "second")
    assert gateway.problems() == ()


@pytest.mark.parametrize(
    ("processor", "text"),
    [
        ({**PROCESSOR, "model": "files 2"}, "model is files 2 at the worker and files 1 at the gateway"),
        ({**PROCESSOR, "processor": "Other"}, "processor setting processor is Other at the worker and QwenProcessor"),
    ],
)
async def test_worker_with_another_model_or_processor_is_refused_with_one_line_on_both_sides(
    cluster, caplog, processor, text
):
    gateway = await cluster.gateway(forget_worker_s=60.0)
    await cluster.worker(
        "w", gateway.port, card=msgspec.structs.replace(CARD, processor=processor), join_refused_interval_s=0.05
    )
    await eventually(lambda: "refuses this worker" in caplog.text and "is refused" in caplog.text)
    await eventually(lambda: gateway.pool.links["w"].is_failing)
    assert [record.message for record in caplog.records if text in record.message] == [
        f"worker w is refused: {next(r.message for r in caplog.records if 'is refused' in r.message)[21:]}",
        next(record.message for record in caplog.records if "refuses this worker" in record.message),
    ]
    assert gateway.problems()[0] == "0 of 1 workers are ready"
    assert "are refused" in gateway.problems()[1]


@pytest.mark.parametrize("differing", [{"dtype": "float16"}, {"vllm": "0.33.0"}])
async def test_worker_with_another_dtype_or_release_serves_without_shared_features(cluster, differing):
    gateway = await cluster.gateway()
    await cluster.worker("w", gateway.port, card=msgspec.structs.replace(CARD, processor={**PROCESSOR, **differing}))
    await eventually(lambda: gateway.ready == {"w"})
    assert not gateway.pool.links["w"].same_processor


async def test_workers_may_differ_in_block_size_and_length(cluster):
    gateway = await cluster.gateway()
    for name, sizes in {"a": {"block_size": 16}, "b": {"block_size": 32, "max_model_len": 99}}.items():
        await cluster.worker(name, gateway.port, card=msgspec.structs.replace(CARD, **sizes))
    await eventually(lambda: gateway.ready == {"a", "b"})


async def test_second_worker_of_a_name_waits_until_the_first_is_lost(cluster, caplog):
    caplog.set_level("INFO")
    gateway = await cluster.gateway()
    first = await cluster.worker("w", gateway.port, worker_id="first")
    await eventually(lambda: gateway.ready == {"w"})
    await cluster.worker("w", gateway.port, worker_id="second")
    refused = gateway.pool.links["w"]
    await eventually(lambda: "another worker named w is connected" in caplog.text)
    assert refused.client.welcome.worker_id == "first"
    await first.leave()
    await eventually(lambda: gateway.ready and gateway.pool.links["w"].client.welcome.worker_id == "second")


async def test_connection_whose_loss_the_gateway_has_not_noticed_is_replaced(cluster):
    notices_nothing = msgspec.structs.replace(RPC, heartbeat_timeout_s=3600.0, tcp_heartbeat_timeout_s=3600.0)
    gateway = await cluster.gateway(rpc=notices_nothing)
    proxy = await cluster.proxy(gateway)
    worker = await cluster.worker("w", proxy.port)
    await eventually(lambda: gateway.ready == {"w"})
    earlier = gateway.pool.links["w"].client
    proxy.cut = True
    worker.drop_connections(WorkerLost("missed heartbeats of the peer"))
    await eventually(lambda: worker.num_gateways == 0)
    assert gateway.ready == {"w"}
    proxy.cut = False
    await eventually(lambda: worker.num_gateways == 1 and gateway.pool.links["w"].client is not earlier)
    assert earlier.closed.is_set()
    assert gateway.ready == {"w"}
    assert await tokens(gateway.pool.links["w"].submit(request())) == [1, 2, 3]


async def test_worker_joins_a_gateway_once_through_two_addresses(cluster):
    gateway = await cluster.gateway()
    proxy = await cluster.proxy(gateway)
    worker = await cluster.worker("w", gateway.port, proxy.port)
    await eventually(lambda: gateway.ready == {"w"})
    client = gateway.pool.links["w"].client
    assert await tokens(client.requests.submit(request())) == [1, 2, 3]
    assert (worker.num_gateways, gateway.pool.links["w"].client) == (1, client)


async def test_number_of_workers_is_bounded(cluster, caplog):
    gateway = await cluster.gateway(max_joined_workers=1)
    await cluster.worker("a", gateway.port)
    await eventually(lambda: gateway.ready == {"a"})
    await cluster.worker("b", gateway.port)
    caplog.set_level("INFO")
    await eventually(lambda: "reached its limit of workers" in caplog.text)
    assert set(gateway.pool.links) == {"a"}


async def test_worker_cannot_take_the_name_of_a_configured_one(cluster):
    gateway = await cluster.gateway()
    listed = gateway.pool.links["tcp://10.0.0.1:7000"] = gateway.new_link("tcp://10.0.0.1:7000")
    worker = await cluster.worker("tcp://10.0.0.1:7000", gateway.port)
    await cluster.worker("other", gateway.port)
    await eventually(lambda: gateway.ready == {"other"})
    assert gateway.pool.links["tcp://10.0.0.1:7000"] is listed
    assert worker.num_gateways == 0


async def test_gateway_without_workers_is_unavailable_and_says_why(cluster):
    gateway = await cluster.gateway()
    assert health_of(gateway.pool) == health_of(gateway.pool).__class__("unavailable", ("no worker has joined",))
