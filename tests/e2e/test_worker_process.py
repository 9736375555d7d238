"""A worker's whole process over real vLLM: what is left when one of its processes is killed."""

import asyncio
import os
import signal
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from process_tree import command_of
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.serial_utils import MsgpackEncoder

from medialane.core.errors import NoWorkerReady, WorkerLost
from medialane.core.request import EngineRequest, ExpandedPrompt
from medialane.rpc import Hello, RpcClient, RpcConfig
from medialane.worker import EXIT_ENGINE_LOST

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("worker_program.py")
START_S = 180
END_S = 30


class WorkerProcess:
    def __init__(self, process, address):
        self.process = process
        self.address = address

    async def connect(self):
        async with asyncio.timeout(START_S):
            while True:
                try:
                    return await RpcClient.connect(self.address, Hello(gateway_id="g"), RpcConfig())
                except NoWorkerReady:
                    assert self.process.returncode is None, "the worker ended during its start"
                    await asyncio.sleep(0.2)

    def family(self):
        """The processes that the worker started, and those that they did."""
        found, todo = [], [self.process.pid]
        while todo:
            started = children(todo.pop())
            found += started
            todo += started
        return found

    def engine_core(self):
        (pid,) = [pid for pid in children(self.process.pid) if "EngineCore" in command_of(pid)]
        return pid


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@asynccontextmanager
async def running(model, environ, folder):
    address = f"unix:{folder}/w"
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(PROGRAM), str(model), address, env=environ, stdout=log, stderr=log
        )
    try:
        yield WorkerProcess(process, address)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
def sockets():
    """Where vLLM's processes make theirs: a short path."""
    with tempfile.TemporaryDirectory(prefix="ml-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
async def worker(tiny_model, vllm_environ, tmp_path, sockets):
    async with running(tiny_model, {**vllm_environ, "VLLM_RPC_BASE_PATH": str(sockets)}, tmp_path) as worker:
        yield worker


async def start_long_answer(client):
    params = SamplingParams(max_tokens=8000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    sent = EngineRequest("r", ExpandedPrompt([100, 101, 102]), bytes(MsgpackEncoder().encode(params)[0]))
    remote = client.submit(sent)
    await anext(aiter(remote))
    return remote


async def gone(pids):
    for _ in range(END_S * 10):
        if not [pid for pid in pids if _lives(pid)]:
            return
        await asyncio.sleep(0.1)
    raise TimeoutError("the worker's processes are still there")


async def read_to_the_end(remote):
    async with asyncio.timeout(END_S):
        async for _ in remote:
            pass


def _lives(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def test_killed_engine_core_fails_its_requests_and_ends_the_worker(worker):
    client = await worker.connect()
    remote = await start_long_answer(client)
    family = worker.family()
    os.kill(worker.engine_core(), signal.SIGKILL)
    with pytest.raises(WorkerLost):
        await read_to_the_end(remote)
    async with asyncio.timeout(END_S):
        assert await worker.process.wait() == EXIT_ENGINE_LOST
    await gone(family)
    await client.close()


async def test_killed_worker_leaves_no_process_behind(worker):
    client = await worker.connect()
    remote = await start_long_answer(client)
    family = worker.family()
    assert family
    worker.process.kill()
    with pytest.raises(WorkerLost):
        await read_to_the_end(remote)
    await gone(family)
    await client.close()


async def test_terminated_worker_ends_cleanly_with_a_request_under_way(worker, sockets):
    client = await worker.connect()
    assert any(path.is_socket() for path in sockets.rglob("*"))
    remote = await start_long_answer(client)
    family = worker.family()
    worker.process.terminate()
    with pytest.raises(WorkerLost):
        await read_to_the_end(remote)
    async with asyncio.timeout(END_S):
        assert await worker.process.wait() == 0
    await gone(family)
    assert not list(sockets.iterdir())
    await client.close()
