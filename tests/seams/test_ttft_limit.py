"""The limit of the time to first token, of a gateway with a worker: what it learns, refuses, and does not touch."""

import pytest
from gateway_parts import Parts, png, prompt, request

from medialane.gateway import GatewayConfig, open_scope
from medialane.types.errors import TtftLimitExceeded
from medialane.types.request import WorkerLoad

LIMIT_S = 0.02
FAST = {"reconnect_initial_s": 0.01, "reconnect_max_s": 0.05}


async def answers(parts, number, *, token_s=0.05):
    for n in range(number):
        with open_scope():
            assert await parts.generate(request(f"r{n}", [1, 2, 3], token_s=token_s), None)


async def test_text_is_refused_once_it_is_known_to_take_longer_than_the_limit(arena, preparers, worker):
    config = GatewayConfig(ttft_limit_s=LIMIT_S, **FAST)
    async with Parts(arena, preparers, [worker], config=config) as parts:
        await answers(parts, 15)
        with pytest.raises(TtftLimitExceeded):
            await answers(parts, 30)
        with open_scope() as scope:
            scope.ttft_limit_ms = 10_000.0
            assert await parts.generate(request("own", [1, 2, 3]), None)


async def test_media_are_not_touched_if_no_engine_will_be_free_in_time(arena, preparers, worker):
    async with Parts(arena, preparers, [worker], config=GatewayConfig(ttft_limit_s=10.0, **FAST)) as parts:
        await answers(parts, 30, token_s=0.01)
        parts.router.report(0, WorkerLoad(num_waiting=100_000))
        with open_scope() as scope:
            with pytest.raises(TtftLimitExceeded) as refused:
                await parts.gateway.prepare(prompt(png()))
            assert refused.value.retry_after_s
            assert scope.timeline.cache == "none"
        assert preparers.stats().num_done == 0
        parts.router.report(0, WorkerLoad())
        with open_scope():
            await parts.gateway.prepare(prompt(png()))


async def test_nothing_is_learned_without_a_limit(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope() as scope:
            assert await parts.generate(request("r", [1, 2, 3]), None)
            assert scope.expectation is None
