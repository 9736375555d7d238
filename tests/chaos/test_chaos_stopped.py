"""SIGSTOP of what `serve` has started, in the middle of things: what does not need it goes on, and after SIGCONT all
requests are answered."""

import asyncio
import os
import signal

import pytest
from mixed_load import GATEWAY_LOST, STORE_LOST, asking
from openai_http import chat, picture, text
from process_tree import is_alive, suspended

from waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.whole, pytest.mark.asyncio(loop_scope="session")]

#: Shorter than --worker-stall-timeout, and than the time after which `serve` replaces a stopped process.
STOPPED_S = 4
AT_ONCE_S = 3
#: How long a process waits to be forked is 10 s.
SCRATCH_S = 30


@pytest.mark.parametrize("kind", ["warm", "preparer", "fork server", "store", "gateway", "engine", "worker"])
async def test_process_that_is_stopped_for_seconds_costs_nothing_but_time(client, processes, kind):
    before = processes.numbers()
    async with asking(client, seed=11, num_new=12) as load:
        pids = processes.of(kind)
        with suspended(*pids):
            await asyncio.sleep(STOPPED_S)  # time: all clients have come to it
        await load.answers(len(load.repeated))
        assert processes.of(kind) == pids
    await load.all_that_was_ready_is_a_hit()
    assert processes.numbers() == before


async def test_text_is_answered_while_the_store_is_stopped_and_media_afterwards(client, processes):
    ask = text("Is the store there?")
    right = (await client.succeed(chat(ask))).ids
    with suspended(*processes.of("store")):
        waiting = asyncio.create_task(client.succeed(chat(picture(4000), ask)))
        async with asyncio.timeout(AT_ONCE_S):
            assert (await client.succeed(chat(ask))).ids == right
        assert not waiting.done()
    answered = await waiting
    assert (await client.succeed(chat(picture(4000), ask))).ids == answered.ids


@pytest.mark.parametrize("kind", ["gateway", "engine", "worker"])
async def test_store_is_killed_while_its_clients_are_stopped(client, processes, kind):
    """They go on with what they held, or wrote, in the arena of the killed store. What nobody holds is overwritten
    before they return to the next one, or right afterwards."""
    before = processes.numbers()
    async with asking(client, seed=12, num_new=24) as load:
        load.allowed = STORE_LOST
        for _ in range(3):
            await load.answers(10)
            pids = processes.of(kind)
            with suspended(*pids):
                old = processes.of("store")
                await processes.kill(old)
                await eventually(lambda killed=old: processes.has_another_store(killed), "the next store", 30)
                load.ready = set()  # overwritten now
                os.kill(processes.of("store")[0], signal.SIGUSR1)
            os.kill(processes.of("store")[0], signal.SIGUSR1)
            assert all(map(is_alive, pids))
        await load.answers(len(load.repeated))
    await processes.are(before)


@pytest.mark.timeout(400)
async def test_gateway_is_started_from_scratch_while_the_warm_process_is_stopped(client, processes):
    before, num_from_scratch = processes.numbers(), processes.num_from_scratch()
    async with asking(client, seed=13, num_new=12) as load:
        load.allowed = GATEWAY_LOST
        with suspended(*processes.of("warm")):
            await processes.kill(processes.of("gateway")[:1])
            await eventually(lambda: processes.num_from_scratch() > num_from_scratch, "the log says so", SCRATCH_S)
            await processes.are(before)
        await load.answers(10)
        await processes.kill(processes.of("gateway")[:1])
        await processes.are(before)
    assert processes.num_from_scratch() == num_from_scratch + 1
