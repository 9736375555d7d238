"""NIXL reads from the memory of a GPU into an arena."""

import asyncio
import gc
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from medialane.arena import describe
from medialane.transfer.nixl import RdmaMetadata
from medialane.types.tensor import TensorSpec
from nixl_hosts import MIB, Host, require_nixl

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

SPEC = TensorSpec("uint8", (4 * MIB,))

#: Publishes a tensor on cuda:0 as RdmaMetadata; ends when it has been read.
OWNER = """
import hashlib, sys, time, torch
tensor = torch.randint(0, 256, (int(sys.argv[1]),), dtype=torch.uint8, device="cuda:0")
from medialane.transfer.nixl.nixl_agent import NixlAgent
from medialane.transfer.nixl.agent import Descriptor, RdmaMetadata, pack_agent_metadata
agent, descriptor = NixlAgent("gpu"), Descriptor("cuda:0", tensor.data_ptr(), tensor.numel())
agent.register(descriptor)
sys.stdout.write(RdmaMetadata([descriptor], pack_agent_metadata(agent.metadata()), "key").encode().decode() + "\\n")
sys.stdout.write(hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest() + "\\n")
sys.stdout.flush()
while b"key" not in agent.notifications():
    time.sleep(0.01)  # time: between two polls
"""


@pytest.fixture
async def reader():
    torch = pytest.importorskip("torch")
    require_nixl()
    if not torch.cuda.is_available():
        pytest.skip("NOT TESTED: NIXL from the memory of a GPU: there is no CUDA device")
    host = Host()
    yield host
    await host.close()
    gc.collect()  # a traceback references frames, which reference views of the arena


async def test_tensor_on_a_gpu_is_read_into_the_arena_and_its_owner_is_notified(reader):
    owner = started_owner()
    try:
        lines = [await next_line(owner) for _ in range(2)]
        destination = reader.destination(SPEC.nbytes)
        metadata = RdmaMetadata.decode(lines[0].encode())
        await reader.mover.read_published(metadata, describe(destination.range, (SPEC,)), deadline_s=60)
        assert hashlib.sha256(destination.payload).hexdigest() == lines[1]
        assert await asyncio.to_thread(owner.wait, 30) == 0, "it has received the notification"
    finally:
        owner.kill()
        owner.communicate()


async def next_line(owner) -> str:
    """Return its next line that is not NIXL's own output."""
    while line := await asyncio.wait_for(asyncio.to_thread(owner.stdout.readline), 60):
        if " NIXL " not in line:
            return line.strip()
    raise AssertionError("the owner has exited")


def started_owner() -> subprocess.Popen:
    path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "NIXL_LOG_LEVEL": "WARN"}
    command = [sys.executable, "-c", OWNER, str(SPEC.nbytes)]
    return subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True)
