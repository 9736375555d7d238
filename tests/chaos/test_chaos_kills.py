"""kill -9 of everything that `serve` has started, under mixed load, with real vLLM: every answer is right or an error
that says when to try again, what was cached is a hit afterwards, and nothing is left of what has died."""

import asyncio
import random

import pytest
from mixed_load import GATEWAY_LOST, STORE_LOST, WORKER_LOST, asking
from process_tree import is_alive
from served_processes import RESTART_S

from waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.whole, pytest.mark.asyncio(loop_scope="session")]

#: What clients may see when a process of this kind is killed.
SEEN = {
    "warm": frozenset(),
    "preparer": frozenset(),
    "fork server": STORE_LOST,
    "store": STORE_LOST,
    "gateway": GATEWAY_LOST,
    "engine": WORKER_LOST,
    "worker": WORKER_LOST,
}
NUM_STORE_KILLS = 20
#: Between two kills: 20 of them take less than five minutes.
MAX_BETWEEN_S = 14.0


@pytest.mark.parametrize("kind", SEEN)
async def test_killed_process_costs_time_and_its_own_requests_only(client, processes, kind):
    before, num_descriptors = processes.numbers(), processes.num_descriptors()
    async with asking(client, seed=1, num_new=12) as load:
        load.allowed = SEEN[kind]
        killed = processes.of(kind)
        await processes.kill(killed[:1])
        await load.answers(20)
        await processes.are(before)
        assert not set(killed[:1]) & set(processes.of(kind))
        load.allowed = frozenset()
        await load.answers(len(load.repeated))
    await load.all_that_was_ready_is_a_hit()
    assert processes.num_descriptors() == num_descriptors


@pytest.mark.parametrize("kind", ["gateway", "store"])
async def test_process_that_is_killed_with_the_warm_one_comes_back(client, processes, kind):
    """It waits for the next warm process, and is forked by that."""
    before, num_descriptors = processes.numbers(), processes.num_descriptors()
    async with asking(client, seed=4, num_new=12) as load:
        load.allowed = SEEN[kind]
        await processes.kill([*processes.of("warm"), *processes.of(kind)[:1]])
        num_from_scratch = processes.num_from_scratch()
        await processes.are(before)
        await processes.can_fork()
        await processes.kill(processes.of(kind)[:1])
        await processes.are(before)
    assert processes.num_from_scratch() == num_from_scratch
    assert processes.num_descriptors() == num_descriptors


async def test_all_processes_are_killed_at_once(client, processes):
    before, num_descriptors = processes.numbers(), processes.num_descriptors()
    async with asking(client, seed=2, num_new=12) as load:
        load.allowed = frozenset().union(*SEEN.values())
        await processes.kill(processes.all())
        await load.answers(20)
        await processes.are(before)
    await load.all_that_was_ready_is_a_hit()
    assert processes.num_descriptors() == num_descriptors


@pytest.mark.timeout(900)
async def test_twenty_store_kills_in_five_minutes_lose_nothing(client, processes):
    """The next one comes at any time after the last: also while the store is starting, or clients come back to it."""
    before, num_descriptors = processes.numbers(), processes.num_descriptors()
    choice = random.Random(3)
    async with asking(client, seed=3, num_new=4 * NUM_STORE_KILLS) as load:
        load.allowed = STORE_LOST
        for _ in range(NUM_STORE_KILLS):
            between = asyncio.sleep(choice.uniform(0, MAX_BETWEEN_S))  # time: when the next kill comes
            await asyncio.gather(between, eventually(lambda: processes.of("store"), "there is a store", RESTART_S))
            await processes.kill(processes.of("store"))
        await load.answers(len(load.repeated))
        await processes.are(before)
    await load.all_that_was_ready_is_a_hit()
    assert processes.num_descriptors() == num_descriptors


async def test_stop_leaves_nothing(processes, serving, shared_memory, runtime_directory):
    everyone = processes.all()
    assert serving.stop() == 0, serving.tail()
    assert not [pid for pid in everyone if is_alive(pid)]
    assert not list(shared_memory.iterdir())
    assert not list(runtime_directory.iterdir())
