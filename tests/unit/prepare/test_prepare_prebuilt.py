"""Fork servers that are forked with a processor that was built before, and ones that are exec'ed instead."""

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from preparer_pools import FACTORY, children, fork_forkserver, forkserver_of, is_running, make_pool, png, put, running

from builders import checked_arena
from medialane.prepare import PreparerPool
from waiting import eventually

CONFIG = b"{}"
KINDS = ("exec'ed", "forked")


def fork(kind: str) -> None:
    if kind == "forked":
        fork_forkserver(FACTORY, CONFIG, os.environ)


async def prepare(pool: PreparerPool, arena, number: int = 0) -> tuple[bytes, list[bytes]]:
    with put(arena, png(seed=number)) as encoded:
        pin = await pool.prepare_item(encoded, b'{"scale": 3}', f"{number:064}")
    with pin:
        tensors = [bytes(arena.view.tensor(tensor)) for tensor in pin.value.tensors]
        return pin.value.header, tensors


def open_files(pid: int | str) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def private_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


async def test_both_kinds_make_equal_features():
    made = []
    for kind in KINDS:
        with checked_arena(32 << 20) as arena:
            pool = make_pool(arena, CONFIG)
            async with running(pool, partial(fork, kind)):
                made.append((await prepare(pool, arena), dict(pool.processor_settings)))
    assert made[0] == made[1]


async def test_waiting_fork_server_becomes_that_of_the_pool_and_builds_nothing(arena):
    before = children()
    fork_forkserver(FACTORY, CONFIG, os.environ)
    (waiting,) = children() - before
    pool = make_pool(arena, CONFIG, start_timeout_s=60.0)
    assert pool.is_prebuilt
    await pool.start()
    assert forkserver_of(pool.preparer_pids[0]) == waiting
    assert not pool.is_prebuilt, "it is taken"
    await pool.close()
    assert children() == before


@pytest.mark.parametrize("config", [CONFIG, b'{"warm_s": 0.01}'])
async def test_processor_of_other_settings_is_not_used_and_its_process_ends(arena, caplog, config):
    environment = dict(os.environ) if config != CONFIG else {**os.environ, "VLLM_OTHER": "secret value"}
    pool, before, waiting = make_pool(arena, CONFIG), children(), set()

    def fork_other():
        fork_forkserver(FACTORY, config, environment)
        waiting.update(children() - before)
        assert not pool.is_prebuilt

    async with running(pool, fork_other):
        assert len(waiting) == 1
        assert forkserver_of(pool.preparer_pids[0]) not in waiting
        await eventually(lambda: not waiting & children())
        await prepare(pool, arena)
    name = "VLLM_OTHER" if config == CONFIG else "the model's flags"
    assert f"the prebuilt processor is not used: it was built with other values of {name}" in caplog.text
    assert "secret value" not in caplog.text


async def test_variables_that_nothing_is_built_from_may_differ(arena):
    pool = make_pool(arena, CONFIG)

    def fork_other():
        fork_forkserver(FACTORY, CONFIG, {**os.environ, "OMP_NUM_THREADS": "7", "MEDIALANE_PHASE_FILE": "/x"})
        assert pool.is_prebuilt

    async with running(pool, fork_other):
        await prepare(pool, arena)


async def test_new_one_is_exec_ed_after_the_death_of_fork_server_and_spare(arena):
    pool = make_pool(arena, CONFIG)
    async with running(pool, partial(fork, "forked")):
        await eventually(lambda: pool.spare_pid is not None)
        pair = [forkserver_of(pool.preparer_pids[0]), pool.spare_pid]
        for pid in pair:
            os.kill(pid, signal.SIGSTOP)  # so that neither replaces the other
        for pid in pair:
            os.kill(pid, signal.SIGKILL)
        await eventually(lambda: pool.stats().num_forkserver_restarts == 1)
        await eventually(lambda: pool.degradation is None, timeout_s=15)
        await prepare(pool, arena)


async def test_fork_server_that_nobody_takes_ends_with_its_store():
    reader, writer = os.pipe()
    store = os.fork()
    if store == 0:
        try:
            fork_forkserver(FACTORY, CONFIG, os.environ)
            (waiting,) = children()
            os.write(writer, str(waiting).encode())
            signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    waiting = int(os.read(reader, 20))
    assert is_running(waiting)
    os.kill(store, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, store, 0)
    await eventually(lambda: not is_running(waiting))
    os.close(reader)
    os.close(writer)


def test_without_a_built_processor_no_process_is_forked():
    program = "from medialane.prepare import fork_forkserver; fork_forkserver()"
    program = f"import os; {program}; print(open(f'/proc/self/task/{{os.getpid()}}/children').read())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
async def test_twenty_preparers_leave_nothing_behind(arena, kind):
    pool = make_pool(arena, CONFIG, num_preparers=2, max_jobs_per_preparer=1)
    async with running(pool, partial(fork, kind)):
        await eventually(lambda: pool.spare_pid is not None)
        server = forkserver_of(pool.preparer_pids[0])

        async def state():
            def is_settled():
                return len(below(server)) <= 5 and pool.stats().num_alive == 2  # two successors, and the spare

            await eventually(is_settled)
            return open_files("self"), open_files(server), private_kib(server)

        pids = set()
        for number in range(10):
            await prepare(pool, arena, number)
        before = await state()
        number = 10
        while len(pids) < 20:  # a preparer is replaced after a job, once its successor is ready
            await prepare(pool, arena, number)
            number += 1
            pids.update(pool.preparer_pids)
        after = await state()
        assert after[0] <= before[0] + 4  # successors may be being forked
        assert after[1] <= before[1] + 2
        assert after[2] <= before[2] + 2048


def below(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
async def test_20_fork_servers_leave_nothing_behind(arena, kind):
    pool, used = make_pool(arena, CONFIG), set()
    async with running(pool, partial(fork, kind)):
        states = []
        for number in range(21):
            await eventually(lambda: pool.spare_pid is not None and pool.stats().num_alive == 1)
            await prepare(pool, arena, number)
            server = forkserver_of(pool.preparer_pids[0])
            states.append((open_files("self"), open_files(server), private_kib(server)))
            used.add(server)
            if number < 20:
                os.kill(server, signal.SIGKILL)
                await eventually(lambda: pool.stats().num_forkserver_restarts == len(used))
        assert pool.stats().num_forkserver_restarts == 20
        assert len(used) == 21
        assert [pid for pid in used if is_running(pid)] == [server]
        # The first has memory of the build; its spare is a fork.
        assert states[-1][:2] == states[1][:2]
        assert states[-1][2] <= states[1][2] + 4096
