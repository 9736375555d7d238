"""A gateway is killed and forked again 200 times: nothing is left of it."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from chaotic_serve import FLAGS, SERVER_FLAGS
from medialane_process import MedialaneProcess
from openai_http import OpenAiHttp
from process_tree import is_alive, zombies
from served_processes import ServedProcesses

from medialane.runtime.resources import pss_bytes
from medialane.testing.tiny_model import TINY_MODEL_ENVIRON
from waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1800)]

NUM_RESTARTS = 200
#: Until caches and allocators have what they keep.
NUM_WARM_UP = 20
#: Of each process, for all restarts: 60 KB for each of them. A connection, a task or a request that is left is more.
MAX_GROWTH_BYTES = 12 << 20
BACK_S = 60


class Left(msgspec.Struct, frozen=True):
    """What may be left: by process the number of descriptors and of threads; zombies, and files in shared memory."""

    descriptors: dict[int, int]
    threads: dict[int, int]
    num_zombies: int
    files: list[str]


@pytest.fixture
def serving(tiny_model, tmp_path, runtime_directory, shared_memory) -> Iterator[MedialaneProcess]:
    """A gateway that dies again and again is restarted at once."""
    process = MedialaneProcess.spawn(
        "serve",
        str(tiny_model),
        ["--workers", "1", "--restart-reset", "0.05", "--verbose", *FLAGS, "--gateways", "1",
         "--arena-directory", str(shared_memory)],
        SERVER_FLAGS,
        environ={**TINY_MODEL_ENVIRON, **os.environ, "XDG_RUNTIME_DIR": str(runtime_directory)},
        log=tmp_path / "serve.log",
    )  # fmt: skip
    yield process
    process.stop()


async def test_two_hundred_gateway_restarts_leave_no_descriptor_memory_or_zombie(serving, shared_memory):
    await serving.answers()
    await eventually(lambda: "Ctrl-C stops it" in serving.log.read_text(), "all are ready", BACK_S, more=serving.tail)
    processes, client = ServedProcesses(serving), OpenAiHttp(serving.base_url, serving.model)
    num_before = num_from_scratch(serving)

    async def restart() -> None:
        (gateway,) = await processes.of("gateway")
        await processes.kill([gateway])
        await eventually(lambda: processes.of("gateway"), "there is another gateway", BACK_S, more=serving.tail)
        await serving.answers(BACK_S)

    for _ in range(NUM_WARM_UP):
        await restart()
    gateways = await processes.of("gateway")
    others = [serving.pid, *(pid for pid in await processes.all() if pid not in gateways)]
    before, sizes = left(serving.pid, others, shared_memory), {pid: pss_bytes(pid) for pid in others}
    for _ in range(NUM_RESTARTS - NUM_WARM_UP):
        await restart()

    await eventually(lambda: left(serving.pid, others, shared_memory) == before, "nothing is left", more=lambda: before)
    assert all(map(is_alive, others))
    grown = {pid: pss_bytes(pid) - size for pid, size in sizes.items()}
    assert max(grown.values()) < MAX_GROWTH_BYTES, grown
    assert num_from_scratch(serving) == num_before
    assert (await client.metrics()).value("medialane_worker_state", state="ready") == 1


def left(serve: int, pids: list[int], shared_memory: Path) -> Left:
    return Left(
        {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in pids},
        {pid: len(os.listdir(f"/proc/{pid}/task")) for pid in pids},
        len(zombies(serve)),
        sorted(path.name for path in shared_memory.iterdir()),
    )


def num_from_scratch(serving: MedialaneProcess) -> int:
    """How many processes were not forked, by the log."""
    return serving.log.read_text().count("is started from scratch")
