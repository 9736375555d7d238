"""Pending work and load between the gateways of one worker."""

import asyncio
from contextlib import suppress

import msgspec
import pytest
from rpc_reports import Reported
from rpc_requests import engine_request, tokens_of

from medialane.testing.fake_worker import FAKE_CARD, FakeHandler
from medialane.types.admin import (
    IsSleeping,
    PauseGeneration,
    ReleaseKvCacheMemory,
    ResetEncoderCache,
    ResetPrefixCache,
    Sleep,
)
from medialane.types.errors import GenerationFailed, WorkerLost
from medialane.types.request import EncoderCard
from medialane.types.stats import PendingWork
from medialane.wire import Gateways, Pending, PendingEnded, RpcConfig
from waiting import eventually

WORK = PendingWork(0, bytes(16), (("hash", 10),), 5.0)


async def connected(net, count, config=None):
    seen = [Reported(await net.connect(config, gateway_id=f"g{number}")) for number in range(count)]
    await eventually(lambda: all(one.client.reports.num_gateways == count for one in seen))
    return seen


async def test_work_of_one_gateway_reaches_the_others_until_it_ends(net):
    await net.serve(FakeHandler())
    first, *others = await connected(net, 3)
    ends = [first.client.reports.announce(WORK) for _ in range(2)]
    await eventually(lambda: all(list(other.begun.values()) == [WORK, WORK] for other in others))
    for end, is_computed in zip(ends, (True, False), strict=True):
        end(is_computed)
    for other in others:
        await eventually(lambda other=other: other.ended == dict(zip(other.begun, (True, False), strict=True)))
    assert (first.begun, first.ended) == ({}, {})


EMPTIES = [ResetEncoderCache(), Sleep(1), Sleep(2), PauseGeneration(), PauseGeneration("wait"), ReleaseKvCacheMemory()]
KEEPS = [ResetPrefixCache(), Sleep(0), PauseGeneration("keep"), PauseGeneration(clear_cache=False), IsSleeping()]


@pytest.mark.parametrize(("call", "empties"), [*((c, True) for c in EMPTIES), *((c, False) for c in KEEPS)])
async def test_every_gateway_learns_that_one_has_emptied_the_encoder_caches(net, call, empties):
    await net.serve(FakeHandler())
    first, second = await connected(net, 2)
    await first.client.calls.administer(call, 5)
    assert first.num_cleared == empties, "before the call's result"
    await second.client.calls.administer(IsSleeping(), 5)  # what was sent before it has arrived
    assert second.num_cleared == empties


async def test_failed_call_leaves_the_encoder_caches(net):
    handler = FakeHandler()
    handler.admin_result = GenerationFailed("failed")
    await net.serve(handler)
    first, second = await connected(net, 2)
    for one in (first, second):
        with pytest.raises(GenerationFailed):
            await one.client.calls.administer(ResetEncoderCache(), 5)
    assert (first.num_cleared, second.num_cleared) == (0, 0)


async def test_call_of_a_gateway_that_disconnects_may_have_emptied_the_encoder_caches(net):
    handler = FakeHandler(delay_s=30)
    await net.serve(handler)
    first, second = await connected(net, 2)
    call = asyncio.create_task(first.client.calls.administer(ResetEncoderCache(), 5))
    await eventually(lambda: handler.calls)
    await first.client.close()
    await eventually(lambda: second.num_cleared == 1)
    with pytest.raises(WorkerLost):
        await call


@pytest.mark.parametrize("error", [None, GenerationFailed("failed")])
async def test_every_gateway_learns_that_a_call_has_replaced_the_encoder(net, error):
    encoders = [EncoderCard(digest * 64, "bfloat16", {"image": 8}) for digest in "ab"]
    cards = [msgspec.structs.replace(FAKE_CARD, encoder=encoder) for encoder in encoders]
    handler = FakeHandler(card=cards[0])
    await net.serve(handler)
    first, second = await connected(net, 2)
    assert [one.client.reports.encoder for one in (first, second)] == [encoders[0]] * 2
    administer = handler.administer

    async def replacing(call):
        handler.card = cards[1]
        if error is not None:
            raise error
        return await administer(call)

    handler.administer = replacing
    with suppress(GenerationFailed):
        await first.client.calls.administer(IsSleeping(), 5)
    await eventually(lambda: [one.client.reports.encoder for one in (first, second)] == [encoders[1]] * 2)
    assert (first.num_cleared, second.num_cleared) == (1, 1)


async def test_numbers_of_two_gateways_do_not_collide_at_a_third(net):
    await net.serve(FakeHandler())
    first, second, third = await connected(net, 3)
    first.client.reports.announce(WORK)(True)
    second.client.reports.announce(WORK)
    await eventually(lambda: len(third.begun) == 2 and len(third.ended) == 1)
    await eventually(lambda: len(first.begun) == 1)
    assert first.ended == {}


async def test_lost_gateway_ends_its_pending_work_as_not_computed(net):
    await net.serve(FakeHandler())
    first, second = await connected(net, 2)
    first.client.reports.announce(WORK)
    await eventually(lambda: len(second.begun) == 1)
    await first.client.close()
    await eventually(lambda: list(second.ended.values()) == [False] and second.client.reports.num_gateways == 1)


async def test_pending_work_of_a_gateway_is_bounded_and_repeated_numbers_are_ignored(net, raw):
    await net.serve(FakeHandler(), msgspec.structs.replace(net.config, max_in_flight=2))
    (seen,) = await connected(net, 1)
    gateway = await raw()
    for number in (1, 1, 2, 3):
        gateway.send(Pending(number, WORK))
    for number in (3, 7, 1, 1, 2):
        gateway.send(PendingEnded(number, is_computed=True))
    await eventually(lambda: len(seen.ended) == 2)
    assert len(seen.begun) == 2


async def test_invalid_work_closes_the_connection_of_its_sender_only(net, raw):
    await net.serve(FakeHandler())
    (seen,) = await connected(net, 1)
    gateway = await raw()
    await gateway.next(Gateways)
    invalid = PendingWork(0, b"", (), 1.0)
    msgspec.structs.force_setattr(invalid, "work_ms", -1.0)
    gateway.send(Pending(1, invalid))
    await eventually(lambda: seen.client.reports.num_gateways == 1)
    assert seen.begun == {}
    assert await tokens_of(seen.client.requests.submit(engine_request("r"))) == [1, 2, 3]


async def test_work_of_an_unknown_rank_is_ignored(net):
    await net.serve(FakeHandler())
    first, second = await connected(net, 2)
    first.client.reports.announce(PendingWork(5, b"", (), 0.0))(True)
    first.client.reports.announce(WORK)
    await eventually(lambda: second.begun)
    assert list(second.begun.values()) == [WORK]
    assert second.ended == {}


@pytest.mark.parametrize("sender", [0, 1])
async def test_changed_load_is_reported_to_all_gateways_before_the_next_heartbeat(net, sender):
    config = RpcConfig(heartbeat_interval_s=60, heartbeat_timeout_s=120)
    await net.serve(FakeHandler(delay_s=0.1), config)
    seen = await connected(net, 2, config)
    assert await tokens_of(seen[sender].client.requests.submit(engine_request("r"))) == [1, 2, 3]
    for one in seen:
        await eventually(
            lambda one=one: [load.num_running for load in one.loads][-2:] == [1, 0],
            more=lambda one=one: one.loads,
        )
