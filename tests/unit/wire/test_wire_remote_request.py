import asyncio

import pytest
from rpc_requests import tokens_of

from medialane.gateway.workers import RemoteRequest
from medialane.types.errors import GenerationFailed, WorkerLost
from medialane.types.request import CompletionDelta, OutputDelta


def delta(token, *, finished=False):
    return OutputDelta("r", [CompletionDelta(0, "", [token])], finished=finished)


class Recorded:
    def __init__(self, *, mergeable=True):
        self.aborts = []
        self.remote = RemoteRequest("r", max_queued_bytes=100, mergeable=mergeable, send_abort=self.aborts.append)


@pytest.fixture
def recorded():
    return Recorded()


async def test_iteration_ends_after_the_finished_delta(recorded):
    recorded.remote.on_output(delta(1), 10)
    recorded.remote.on_output(delta(2, finished=True), 10)
    assert await tokens_of(recorded.remote) == [1, 2]
    assert await tokens_of(recorded.remote) == []


async def test_iteration_waits_for_later_deltas(recorded):
    reading = asyncio.create_task(tokens_of(recorded.remote))
    await asyncio.sleep(0)
    recorded.remote.on_output(delta(1), 10)
    await asyncio.sleep(0)
    recorded.remote.on_output(delta(2, finished=True), 10)
    assert await reading == [1, 2]


async def test_deltas_that_arrived_together_are_delivered_one_by_one(recorded):
    for token in range(23):
        recorded.remote.on_output(delta(token), 1)
    recorded.remote.on_output(delta(23, finished=True), 1)
    deltas = [each async for each in recorded.remote]
    assert [each.completions[0].token_ids for each in deltas] == [[token] for token in range(24)]


async def test_a_reader_can_ask_whether_it_has_to_wait(recorded):
    recorded.remote.on_output(delta(1), 10)
    assert recorded.remote.has_next
    await anext(recorded.remote)
    assert not recorded.remote.has_next


async def test_deltas_far_ahead_of_their_reader_are_merged(recorded):
    for token in range(99):
        recorded.remote.on_output(delta(token), 1)
    recorded.remote.on_output(delta(99, finished=True), 1)
    merged = await anext(recorded.remote)
    assert merged.completions[0].token_ids == list(range(100))
    assert merged.finished
    assert await tokens_of(recorded.remote) == []


async def test_merging_deltas_frees_buffer_space(recorded):
    for token in range(80):
        recorded.remote.on_output(delta(token), 1)
    await anext(recorded.remote)
    for token in range(80, 160):
        recorded.remote.on_output(delta(token), 1)
    assert recorded.aborts == []


async def test_cumulative_outputs_are_delivered_individually():
    recorded = Recorded(mergeable=False)
    recorded.remote.on_output(delta(1), 10)
    recorded.remote.on_output(delta(2, finished=True), 10)
    assert [(await anext(recorded.remote)).completions[0].token_ids for _ in range(2)] == [[1], [2]]


async def test_error_is_raised_after_earlier_deltas(recorded):
    recorded.remote.on_output(delta(1), 10)
    recorded.remote.on_error(GenerationFailed("no"))
    assert (await anext(recorded.remote)).completions[0].token_ids == [1]
    with pytest.raises(GenerationFailed, match="no"):
        await anext(recorded.remote)


async def test_lost_connection_does_not_affect_a_complete_output(recorded):
    recorded.remote.on_output(delta(1, finished=True), 10)
    recorded.remote.on_error(WorkerLost("gone"))
    assert await tokens_of(recorded.remote) == [1]


async def test_release_does_not_affect_a_complete_output(recorded):
    recorded.remote.on_output(delta(1, finished=True), 10)
    recorded.remote.on_release()
    assert await tokens_of(recorded.remote) == [1]


async def test_release_before_the_output_is_complete_fails_the_iteration(recorded):
    recorded.remote.on_release()
    with pytest.raises(GenerationFailed, match="before its output was complete"):
        await anext(recorded.remote)


async def test_abort_is_sent_once_and_ends_the_iteration(recorded):
    reading = asyncio.create_task(anext(recorded.remote))
    await asyncio.sleep(0)
    recorded.remote.abort()
    recorded.remote.abort()
    recorded.remote.on_output(delta(1), 10)
    with pytest.raises(GenerationFailed, match="aborted"):
        await reading
    assert recorded.aborts == ["r"]


@pytest.mark.parametrize(
    "end", [lambda r: r.on_output(delta(1, finished=True), 1), lambda r: r.on_error(WorkerLost(""))]
)
async def test_abort_after_the_end_is_a_no_op(recorded, end):
    end(recorded.remote)
    recorded.remote.abort()
    assert recorded.aborts == []


async def test_overflow_drops_queued_deltas_and_aborts(recorded):
    for token in range(11):
        recorded.remote.on_output(delta(token), 10)
    assert recorded.aborts == ["r"]
    with pytest.raises(GenerationFailed, match="too slowly"):
        await anext(recorded.remote)


async def test_consumed_deltas_free_buffer_space(recorded):
    for token in range(50):
        recorded.remote.on_output(delta(token), 60)
        assert (await anext(recorded.remote)).completions[0].token_ids == [token]
    assert recorded.aborts == []


async def test_single_delta_over_the_limit_passes(recorded):
    recorded.remote.on_output(delta(1, finished=True), 1000)
    assert await tokens_of(recorded.remote) == [1]


async def test_second_consumer_is_rejected(recorded):
    reading = asyncio.create_task(anext(recorded.remote))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one consumer"):
        await anext(recorded.remote)
    recorded.remote.on_output(delta(1, finished=True), 1)
    await reading


async def test_another_consumer_may_follow_a_cancelled_one(recorded):
    reading = asyncio.create_task(anext(recorded.remote))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    recorded.remote.on_output(delta(1, finished=True), 1)
    assert await tokens_of(recorded.remote) == [1]
