"""A worker in a process of its own that is killed or stopped in the middle of a stream."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from rpc_requests import engine_request, tokens_of

from medialane.gateway.workers import RpcClient
from medialane.types.errors import NoWorkerReady, WorkerLost
from medialane.wire import Hello, RpcConfig
from waiting import DEADLINE_S

WORKER = Path(__file__).with_name("rpc_worker.py")
CONFIG = RpcConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.5, connect_timeout_s=0.5, release_timeout_s=0.3)
HELLO = Hello(gateway_id="gateway")


class Worker:
    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    @classmethod
    async def start(cls, address: str) -> "Worker":
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(WORKER), address, "100000", "0.005", stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(DEADLINE_S):
            return cls(process, (await process.stdout.readline()).decode().strip())

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


@pytest.fixture(params=["unix", "tcp"])
async def worker(request, tmp_path):
    worker = await Worker.start(f"unix:{tmp_path}/w.sock" if request.param == "unix" else "tcp://127.0.0.1:0")
    yield worker
    await worker.kill()


async def streams(client, number):
    remotes = [client.requests.submit(engine_request(f"r{i}")) for i in range(number)]
    for remote in remotes:
        await anext(remote)
    return remotes


async def seconds_until_lost(client, remotes) -> float:
    loop = asyncio.get_running_loop()
    started = loop.time()
    for remote in remotes:
        with pytest.raises(WorkerLost):
            await tokens_of(remote)
    assert len(client.requests) == 0
    assert client.closed.is_set()
    return loop.time() - started


async def test_requests_of_a_killed_worker_fail_immediately(worker):
    client = await RpcClient.connect(worker.address, HELLO, RpcConfig())
    remotes = await streams(client, 5)
    worker.process.send_signal(signal.SIGKILL)
    assert await seconds_until_lost(client, remotes) < RpcConfig().heartbeat_timeout_s / 3
    await worker.kill()
    with pytest.raises(NoWorkerReady):
        await RpcClient.connect(worker.address, HELLO, CONFIG)


async def test_requests_of_a_stopped_worker_fail_at_the_heartbeat_timeout(worker):
    client = await RpcClient.connect(worker.address, HELLO, CONFIG)
    remotes = await streams(client, 5)
    worker.process.send_signal(signal.SIGSTOP)
    assert 0.3 < await seconds_until_lost(client, remotes) < 3
    with pytest.raises(WorkerLost, match="in time"):
        await RpcClient.connect(worker.address, HELLO, CONFIG)
    worker.process.send_signal(signal.SIGCONT)
    again = await RpcClient.connect(worker.address, HELLO, RpcConfig())
    await streams(again, 1)
    await again.close()


@pytest.mark.parametrize("worker", ["tcp"], indirect=True)
async def test_stopped_worker_on_another_host_is_lost_soon(worker):
    client = await RpcClient.connect(worker.address, HELLO, RpcConfig())
    remotes = await streams(client, 5)
    worker.process.send_signal(signal.SIGSTOP)
    assert 0.3 < await seconds_until_lost(client, remotes) < 5  # 0.9 s, more on a busy machine; 10 s on the same host


async def test_worker_stopped_for_less_than_the_timeout_loses_no_requests(worker):
    patient = RpcConfig(tcp_heartbeat_interval_s=1.0, tcp_heartbeat_timeout_s=10.0)
    client = await RpcClient.connect(worker.address, HELLO, patient)
    (remote,) = await streams(client, 1)
    worker.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(1.5)  # time: more than the worker's own heartbeat timeout
    worker.process.send_signal(signal.SIGCONT)
    for _ in range(20):
        async with asyncio.timeout(DEADLINE_S):
            await anext(remote)
    await client.close()
