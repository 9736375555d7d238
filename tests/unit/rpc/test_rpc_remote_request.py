import asyncio

import pytest
from rpc_requests import tokens_of

from medialane.core.errors import GenerationFailed, WorkerLost
from medialane.core.request import CompletionDelta, OutputDelta
from medialane.rpc import RemoteRequest


def delta(token, *, finished=False):
    return OutputDelta("r", [CompletionDelta(0, "", [token])], finished=finished)


class Told:
    def __init__(self, *, mergeable=True):
        self.aborts, self.releases = [], []
        self.remote = RemoteRequest(
            "r",
            max_queued_bytes=100,
            mergeable=mergeable,
            send_abort=self.aborts.append,
            on_released=self.releases.append,
        )


@pytest.fixture
def told():
    return Told()


async def test_iteration_ends_after_the_finished_delta(told):
    told.remote.on_output(delta(1), 10)
    told.remote.on_output(delta(2, finished=True), 10)
    assert await tokens_of(told.remote) == [1, 2]
    assert await tokens_of(told.remote) == []


async def test_iteration_waits_for_later_deltas(told):
    reading = asyncio.create_task(tokens_of(told.remote))
    await asyncio.sleep(0)
    told.remote.on_output(delta(1), 10)
    await asyncio.sleep(0)
    told.remote.on_output(delta(2, finished=True), 10)
    assert await reading == [1, 2]


async def test_queued_deltas_are_merged(told):
    for token in (1, 2, 3):
        told.remote.on_output(delta(token), 30)
    told.remote.on_output(delta(4, finished=True), 10)
    merged = await anext(told.remote)
    assert merged.completions[0].token_ids == [1, 2, 3, 4]
    assert merged.finished
    assert await tokens_of(told.remote) == []


async def test_merging_deltas_frees_buffer_space(told):
    for token in (1, 2):
        told.remote.on_output(delta(token), 50)
    await anext(told.remote)
    for token in (3, 4):
        told.remote.on_output(delta(token), 50)
    assert told.aborts == []


async def test_cumulative_outputs_are_delivered_individually():
    told = Told(mergeable=False)
    told.remote.on_output(delta(1), 10)
    told.remote.on_output(delta(2, finished=True), 10)
    assert [(await anext(told.remote)).completions[0].token_ids for _ in range(2)] == [[1], [2]]


async def test_error_is_raised_after_earlier_deltas(told):
    told.remote.on_output(delta(1), 10)
    told.remote.on_error(GenerationFailed("no"))
    assert (await anext(told.remote)).completions[0].token_ids == [1]
    with pytest.raises(GenerationFailed, match="no"):
        await anext(told.remote)


async def test_lost_connection_does_not_affect_a_complete_output(told):
    told.remote.on_output(delta(1, finished=True), 10)
    told.remote.on_lost(WorkerLost("gone"))
    assert await tokens_of(told.remote) == [1]
    assert await told.remote.released() is False
    assert told.releases == []


async def test_release_is_reported_once_to_every_waiter(told):
    waiting = [asyncio.create_task(told.remote.released()) for _ in range(2)]
    await asyncio.sleep(0)
    told.remote.on_output(delta(1, finished=True), 10)
    told.remote.on_release()
    assert await asyncio.gather(*waiting) == [True, True]
    assert told.releases == ["r"]


async def test_release_before_the_output_is_complete_fails_the_iteration(told):
    told.remote.on_release()
    with pytest.raises(GenerationFailed, match="before its output was complete"):
        await anext(told.remote)


async def test_abort_is_sent_once_and_ends_the_iteration(told):
    reading = asyncio.create_task(anext(told.remote))
    await asyncio.sleep(0)
    told.remote.abort()
    told.remote.abort()
    told.remote.on_output(delta(1), 10)
    with pytest.raises(GenerationFailed, match="aborted"):
        await reading
    assert told.aborts == ["r"]


@pytest.mark.parametrize(
    "end", [lambda r: r.on_output(delta(1, finished=True), 1), lambda r: r.on_lost(WorkerLost(""))]
)
async def test_abort_after_the_end_is_a_no_op(told, end):
    end(told.remote)
    told.remote.abort()
    assert told.aborts == []


async def test_overflow_drops_queued_deltas_and_aborts(told):
    for token in range(11):
        told.remote.on_output(delta(token), 10)
    assert told.aborts == ["r"]
    with pytest.raises(GenerationFailed, match="too slowly"):
        await anext(told.remote)


async def test_consumed_deltas_free_buffer_space(told):
    for token in range(50):
        told.remote.on_output(delta(token), 60)
        assert (await anext(told.remote)).completions[0].token_ids == [token]
    assert told.aborts == []


async def test_single_delta_over_the_limit_passes(told):
    told.remote.on_output(delta(1, finished=True), 1000)
    assert await tokens_of(told.remote) == [1]


async def test_second_consumer_is_rejected(told):
    reading = asyncio.create_task(anext(told.remote))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one consumer"):
        await anext(told.remote)
    told.remote.on_output(delta(1, finished=True), 1)
    await reading


async def test_another_consumer_may_follow_a_cancelled_one(told):
    reading = asyncio.create_task(anext(told.remote))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    told.remote.on_output(delta(1, finished=True), 1)
    assert await tokens_of(told.remote) == [1]
