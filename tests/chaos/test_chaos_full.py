"""Little room: an arena that the media of a few requests fill, and a disk of the logs that is full at times."""

import subprocess
from collections.abc import Iterator

import pytest
from chaotic_serve import Disk, ready, spawn, stop_leaves_nothing, survives
from injections import Chaos
from medialane_process import MedialaneProcess
from scenario import CUTS, FULL_DISK, HOARD, KILLS, MALFORMED, OTHERS, STOPS, Scenario

pytestmark = [pytest.mark.vllm, pytest.mark.whole]

SEED = 69
SECONDS = 30.0
ACTIONS = (HOARD, FULL_DISK, *KILLS, *STOPS, *CUTS, *MALFORMED, *OTHERS)
ENDED_S = 60.0


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Disk:
    disk = Disk(tmp_path_factory.mktemp("logs"))
    if subprocess.run([*disk.prefix(), "true"], check=False, capture_output=True, timeout=10).returncode:
        pytest.skip("NOT TESTED: a full disk, since file systems cannot be mounted here")
    return disk


@pytest.fixture(scope="module")
def serving(tiny_model, shared_memory, runtime_directory, tmp_path_factory, disk) -> Iterator[MedialaneProcess]:
    process = spawn(
        tiny_model,
        engine="simulated",
        flags=("--workers", "2", "--preparers", "2", "--arena-size", "64MiB", "--log-dir", str(disk.folder)),
        shared_memory=shared_memory,
        runtime_directory=runtime_directory,
        log=tmp_path_factory.mktemp("chaos") / "serve.log",
        prefix=disk.prefix(),
    )
    yield process
    process.stop()


@pytest.mark.timeout(0)
async def test_no_request_is_wrong_and_nothing_is_left(serving, shared_memory, disk, chaos_seed, chaos_s):
    processes, client = await ready(serving, num_workers=2)

    scenario = Scenario(chaos_seed or SEED, chaos_s or SECONDS, ACTIONS)
    load = await survives(
        processes,
        client,
        scenario,
        Chaos(processes, client, log_folder=lambda: disk.path(serving)),
        shared_memory=shared_memory,
        with_embeds=False,
        ended_s=ENDED_S,
    )
    assert load.counts["arena_full"] or chaos_seed is not None, "the arena was never full"


async def test_stop_leaves_nothing(serving, shared_memory, runtime_directory):
    processes, _ = await ready(serving, num_workers=2)
    await stop_leaves_nothing(processes, shared_memory, runtime_directory)
