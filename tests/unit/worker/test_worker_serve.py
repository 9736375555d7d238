import asyncio
import os
import signal

import msgspec
import pytest

from fake_engine import FAKE_CARD, FakeEngine, FakeParams
from medialane.gateway.workers import RpcClient
from medialane.types.errors import GenerationFailed, NoWorkerReady, StartupFailed, WorkerDraining, WorkerLost
from medialane.types.request import EngineRequest, ExpandedPrompt
from medialane.wire import Hello, RpcConfig
from medialane.worker import EXIT_ENGINE_LOST, WorkerConfig, serve_worker
from waiting import eventually, retried

HELLO = Hello(gateway_id="g", processor=FAKE_CARD.processor)
RPC = RpcConfig(release_timeout_s=2.0)
#: A drain that does not end by its timeout.
NEVER_S = 3600.0


class Serving:
    """A worker in this process, and a client of it."""

    def __init__(self, engine, address, rpc=RPC, *, drain_timeout_s=0.1):
        config = WorkerConfig(ping_interval_s=0.02, stop_timeout_s=1.0)
        serving = serve_worker(
            config, rpc, engine, address, arena_directory="/dev/shm", drain_timeout_s=drain_timeout_s
        )
        self.task = asyncio.create_task(serving)
        self._address = address

    async def connect(self):
        return await retried(lambda: RpcClient.connect(self._address, HELLO, RPC), NoWorkerReady)


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path}/w"


def request(max_tokens=3, token_s=0.0):
    return EngineRequest("r", ExpandedPrompt([1, 2, 3]), msgspec.json.encode(FakeParams(max_tokens, token_s)))


async def num_tokens(remote):
    return sum([len(completion.token_ids) async for delta in remote for completion in delta.completions])


async def test_gateway_gets_its_output(address):
    serving = Serving(FakeEngine(), address)
    client = await serving.connect()
    assert await num_tokens(client.requests.submit(request())) == 3
    await client.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving.task == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_stops_the_worker_after_the_engine_has_released(address, number):
    engine = FakeEngine(release_s=0.05)
    serving = Serving(engine, address)
    client = await serving.connect()
    remote = client.requests.submit(request(10_000, token_s=0.001))
    await anext(aiter(remote))
    os.kill(os.getpid(), number)
    with pytest.raises(WorkerDraining):
        async for _ in remote:
            pass
    assert await serving.task == 0
    assert engine.num_reading == 0
    assert engine.closed
    await client.close()


async def test_draining_worker_ends_its_answers_and_refuses_new_requests(address):
    engine = FakeEngine()
    serving = Serving(engine, address, drain_timeout_s=NEVER_S)
    client = await serving.connect()
    remote = client.requests.submit(request(30, token_s=0.01))
    await anext(aiter(remote))
    os.kill(os.getpid(), signal.SIGTERM)
    await eventually(lambda: client.reports.state == "draining")
    with pytest.raises(WorkerDraining):
        await num_tokens(client.requests.submit(msgspec.structs.replace(request(), request_id="late")))
    assert await num_tokens(remote) == 29
    assert await serving.task == 0
    assert engine.closed
    await client.close()


async def test_gateway_that_connects_to_a_draining_worker_learns_so(address):
    serving = Serving(FakeEngine(), address, drain_timeout_s=NEVER_S)
    client = await serving.connect()
    remote = client.requests.submit(request(10_000, token_s=0.001))
    await anext(aiter(remote))
    client.drain()
    await eventually(lambda: client.reports.state == "draining")
    other = await RpcClient.connect(address, Hello(gateway_id="other", processor=FAKE_CARD.processor), RPC)
    await eventually(lambda: other.reports.state == "draining")
    remote.abort()
    assert await serving.task == 0
    await client.close()
    await other.close()


async def test_idle_worker_stops_at_once(address):
    serving = Serving(FakeEngine(), address, drain_timeout_s=NEVER_S)
    client = await serving.connect()
    client.drain()
    assert await serving.task == 0
    assert client.reports.state == "draining"  # reported before the connection was closed
    await client.close()


async def test_second_signal_ends_the_drain(address):
    serving = Serving(FakeEngine(), address, drain_timeout_s=NEVER_S)
    client = await serving.connect()
    remote = client.requests.submit(request(100_000, token_s=0.001))
    await anext(aiter(remote))
    os.kill(os.getpid(), signal.SIGTERM)
    await eventually(lambda: client.reports.state == "draining")
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(WorkerDraining):
        await num_tokens(remote)
    assert await serving.task == 0
    await client.close()


async def test_lost_engine_ends_the_worker_with_a_distinct_exit_status(address):
    engine = FakeEngine()
    serving = Serving(engine, address)
    client = await serving.connect()
    remote = client.requests.submit(request(10_000, token_s=0.001))
    await anext(aiter(remote))
    engine.die()
    with pytest.raises(WorkerLost):
        async for _ in remote:
            pass
    assert await serving.task == EXIT_ENGINE_LOST
    assert engine.closed
    await client.close()


async def test_worker_listens_until_unreleased_requests_end_with_the_engine(address):
    """A gateway that finds no listener reuses all transferred memory."""

    class Slow(FakeEngine):
        async def close(self):
            if not self.closed:
                self.was_reading = self.num_reading
                with pytest.raises(WorkerLost):  # and not NoWorkerReady
                    await RpcClient.connect(address, HELLO, RPC)
            await super().close()

    engine = Slow(release_s=3600.0)
    serving = Serving(engine, address, RpcConfig(release_timeout_s=0.1))
    client = await serving.connect()
    remote = client.requests.submit(request(10_000, token_s=0.001))
    await anext(aiter(remote))
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving.task == 0
    assert (engine.closed, engine.was_reading) == (True, 1)
    with pytest.raises(NoWorkerReady):
        await RpcClient.connect(address, HELLO, RPC)
    await client.close()


async def test_failed_request_does_not_stop_the_worker(address):
    engine = FakeEngine()
    serving = Serving(engine, address)
    client = await serving.connect()
    engine.die(GenerationFailed("once"))
    remote = client.requests.submit(request())
    with pytest.raises(GenerationFailed):
        async for _ in remote:
            pass
    engine.recover()
    again = client.requests.submit(msgspec.structs.replace(request(), request_id="again"))
    assert await num_tokens(again) == 3
    await client.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving.task == 0


async def test_unusable_address_fails_the_start_and_stops_the_engine():
    engine = FakeEngine()
    with pytest.raises(StartupFailed):
        await serve_worker(WorkerConfig(), RPC, engine, "unix:/no/such/folder/w", arena_directory="/dev/shm")
    assert engine.closed


async def test_unstoppable_engine_is_abandoned_after_the_timeout(address):
    class Stuck(FakeEngine):
        async def close(self):
            await asyncio.Event().wait()

    serving = Serving(Stuck(), address)
    await (await serving.connect()).close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving.task == 0
