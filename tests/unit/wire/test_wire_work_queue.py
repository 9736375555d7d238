"""Who of several gateways gets a request into a worker's queue, over real sockets."""

import asyncio
import math

import msgspec
import pytest
from rpc_requests import engine_request, tokens_of

from medialane.testing.fake_handler import FakeHandler
from medialane.types.errors import WorkerQueued
from medialane.types.request import QueuePlace
from waiting import eventually

HOUR_S = 3600.0


def placed(request_id, max_queue_ms, *, work_ms=100.0, rank=None):
    place = QueuePlace(work_ms, max_queue_ms)
    return msgspec.structs.replace(engine_request(request_id), place=place, data_parallel_rank=rank)


@pytest.fixture
def handler():
    """Of a worker whose answers do not begin."""
    return FakeHandler([1], delay_s=HOUR_S)


@pytest.fixture
async def server(net, handler):
    return await net.serve(handler)


@pytest.fixture
async def gateways(net, server):
    """Three gateways of the worker."""
    return [await net.connect(gateway_id=str(number)) for number in range(3)]


async def accepted(handler, client, request):
    remote, number = client.requests.submit(request), handler.num_active
    await eventually(lambda: handler.num_active == number + 1)
    return remote


async def ended(client, remote):
    remote.abort()
    await eventually(lambda: len(client.requests) == 0)  # released


async def refused(client, request):
    with pytest.raises(WorkerQueued):
        await tokens_of(client.requests.submit(request))


async def test_request_behind_a_longer_queue_than_its_gateway_knew_of_is_sent_back(handler, gateways):
    first, second, third = gateways
    await accepted(handler, first, placed("a", 20.0))
    await refused(second, placed("b", 99.0))
    await accepted(handler, second, placed("c", 100.0))
    await refused(third, placed("d", 199.0))
    await accepted(handler, third, placed("e", math.inf))
    await accepted(handler, third, engine_request("without a place"))
    await accepted(handler, third, placed("other rank", 0.0, rank=1))


async def test_work_counts_until_its_request_ends(handler, gateways):
    first, second, _ = gateways
    remote = await accepted(handler, first, placed("a", 20.0))
    await ended(first, remote)
    await accepted(handler, second, placed("b", 20.0))


async def test_work_counts_until_its_request_has_output(net):
    handler = FakeHandler([1], release_s=HOUR_S)
    await net.serve(handler)
    first, second = await net.connect(gateway_id="first"), await net.connect(gateway_id="second")
    remote = await accepted(handler, first, placed("a", 20.0))
    await anext(aiter(remote))
    await accepted(handler, second, placed("b", 20.0))


async def test_gateway_that_was_refused_is_next(handler, gateways):
    """Though the one whose request has ended asks first."""
    first, second, third = gateways
    remote = await accepted(handler, first, placed("a", 20.0))
    await refused(second, placed("b", 20.0))
    await refused(third, placed("c", 20.0))
    await ended(first, remote)
    await refused(first, placed("d", 20.0))
    await accepted(handler, second, placed("e", 20.0))


async def test_room_is_not_kept_for_long_nor_for_a_gateway_that_is_gone(handler, server, gateways):
    first, second, third = gateways
    remote = await accepted(handler, first, placed("a", 20.0))
    await refused(second, placed("b", 20.0))
    await ended(first, remote)
    await asyncio.sleep(0.02)  # time: longer than room is kept
    remote = await accepted(handler, first, placed("c", 20.0))
    await refused(third, placed("d", 20.0))
    await third.close()
    await second.close()
    await eventually(lambda: server.num_gateways == 1)
    await ended(first, remote)
    await accepted(handler, first, placed("e", 20.0))


@pytest.mark.parametrize("place", [(-1.0, 0.0), (0.0, -1.0), (math.nan, 0.0), (0.0, math.nan)])
async def test_place_out_of_range_is_refused(place):
    with pytest.raises(ValueError, match="out of range"):
        QueuePlace(*place)
