import asyncio

import pytest
from rpc_requests import engine_request

from medialane.testing.fake_worker import FakeHandler
from medialane.types.errors import GenerationFailed, StartupFailed
from medialane.wire import Hello
from waiting import eventually


async def collect(handler):
    return [delta async for delta in handler.run(engine_request("r"))]


async def test_fake_outputs_its_tokens():
    handler = FakeHandler([4, 5])
    deltas = await collect(handler)
    assert [delta.completions[0].token_ids for delta in deltas] == [[4], [5]]
    assert [delta.finished for delta in deltas] == [False, True]
    assert [delta.prompt_token_ids for delta in deltas] == [[0, 1, 2], None]


async def test_fake_fails_at_the_configured_token():
    handler = FakeHandler([4, 5], error=GenerationFailed("no"), fail_at=1)
    answer = handler.run(engine_request("r"))
    assert (await anext(answer)).completions[0].token_ids == [4]
    with pytest.raises(GenerationFailed):
        await anext(answer)
    assert handler.num_active == 0


async def test_fake_rejects_when_configured():
    with pytest.raises(StartupFailed):
        await FakeHandler(refusal=StartupFailed("no")).register(Hello(gateway_id="g"))


async def test_cancelled_fake_releases_after_its_delay():
    handler = FakeHandler([1], delay_s=60, release_s=0.05)
    running = asyncio.create_task(collect(handler))
    await eventually(lambda: handler.num_active == 1)
    running.cancel()
    await asyncio.sleep(0)
    assert (handler.loads()[0].num_running, handler.num_cancelled) == (1, 1)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert handler.loads()[0].num_running == 0
