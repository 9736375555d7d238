"""A worker's whole process over real vLLM, without a supervisor: what remains after SIGKILL and SIGTERM."""

import asyncio
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from medialane_process import launch
from process_tree import descendants, is_alive
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.serial_utils import MsgpackEncoder

from medialane.core.errors import NoWorkerReady, WorkerLost
from medialane.core.request import EngineRequest, ExpandedPrompt
from medialane.rpc import Hello, RpcClient, RpcConfig
from waiting import eventually, retried

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("worker_program.py")
START_S = 180
END_S = 30


@dataclass(frozen=True)
class WorkerProcess:
    """`sockets` is the folder for sockets of vLLM's processes."""

    process: subprocess.Popen
    address: str
    sockets: Path

    async def connect(self):
        async def attempt():
            assert self.process.poll() is None, "the worker ended during its start"
            return await RpcClient.connect(self.address, Hello(gateway_id="g"), RpcConfig())

        return await retried(attempt, NoWorkerReady, START_S)

    async def end(self):
        """Wait until it has ended. Returns the exit status."""
        await eventually(lambda: self.process.poll() is not None, "the worker ends", END_S)
        return self.process.returncode


@pytest.fixture(scope="module")
def workers(tiny_model, vllm_environ, tmp_path_factory):
    """A worker for each test of this file. They start at the same time."""
    with tempfile.TemporaryDirectory(prefix="ml-", dir="/tmp") as folder:  # sockets need a short path
        started = []
        for number in range(2):
            sockets = Path(folder, str(number))
            sockets.mkdir()
            address = f"unix:{folder}/w{number}"
            process = launch(
                [sys.executable, str(PROGRAM), str(tiny_model), address],
                environ={**vllm_environ, "VLLM_RPC_BASE_PATH": str(sockets)},
                log=tmp_path_factory.mktemp("worker") / "log",
            )
            started.append(WorkerProcess(process, address, sockets))
        yield iter(started)
        for worker in started:
            worker.process.kill()
            worker.process.wait()


@pytest.fixture
def worker(workers):
    return next(workers)


async def start_long_answer(client):
    params = SamplingParams(max_tokens=8000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    sent = EngineRequest("r", ExpandedPrompt([100, 101, 102]), bytes(MsgpackEncoder().encode(params)[0]))
    remote = client.submit(sent)
    await anext(aiter(remote))
    return remote


async def read_to_the_end(remote):
    async with asyncio.timeout(END_S):
        async for _ in remote:
            pass


async def test_killed_worker_leaves_no_child_process(worker):
    client = await worker.connect()
    remote = await start_long_answer(client)
    family = descendants(worker.process.pid)
    assert family
    worker.process.kill()
    with pytest.raises(WorkerLost):
        await read_to_the_end(remote)
    await worker.end()
    await eventually(lambda: not any(map(is_alive, family)), "all that it started has ended", END_S)
    await client.close()


async def test_sigterm_ends_the_worker_cleanly_with_a_request_in_flight(worker):
    client = await worker.connect()
    assert any(path.is_socket() for path in worker.sockets.rglob("*"))
    remote = await start_long_answer(client)
    family = descendants(worker.process.pid)
    worker.process.terminate()
    with pytest.raises(WorkerLost):
        await read_to_the_end(remote)
    assert await worker.end() == 0
    await eventually(lambda: not any(map(is_alive, family)), "all that it started has ended", END_S)
    assert not list(worker.sockets.iterdir())
    await client.close()
