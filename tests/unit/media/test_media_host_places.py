import asyncio
from contextlib import AsyncExitStack

import pytest

from medialane.media.host_places import FetchTime, HostPlaces
from medialane.types.errors import MediaOverloaded
from waiting import eventually


def in_time(wait_s=5.0):
    return FetchTime(asyncio.get_running_loop().time() + 10.0, wait_s)


async def taken_at_once(places, host):
    """Take places for a host until it would have to wait."""
    taken = []
    while True:
        try:
            taken.append(await places.take(host, in_time(wait_s=0.0)))
        except MediaOverloaded:
            return taken


async def test_shares_shrink_as_the_places_fill():
    places = HostPlaces(128, 32)
    shares = [len(await taken_at_once(places, f"host{n}")) for n in range(10)]
    assert shares == [32, 32, 32, 17, 8, 4, 2, 1, 0, 0]


@pytest.mark.parametrize("num_places", [1, 2, 4])
async def test_all_places_can_be_taken(num_places):
    places = HostPlaces(num_places, 1)
    for n in range(num_places):
        await places.take(f"host{n}", in_time(wait_s=0.0))
    with pytest.raises(MediaOverloaded):
        await places.take("another", in_time(wait_s=0.0))


async def test_place_goes_to_the_host_with_the_fewest():
    places, order = HostPlaces(3, 2), []
    held = [await places.take(host, in_time()) for host in ("a", "a", "b")]

    async def take(host):
        await places.take(host, in_time())
        order.append(host)

    tasks = [asyncio.create_task(take(host)) for host in ("a", "b", "c")]
    await asyncio.sleep(0)
    places.give_back(held[0])
    await eventually(lambda: order == ["c"])
    places.give_back(held[1])
    await eventually(lambda: order == ["c", "a"])
    places.give_back(held[2])
    await asyncio.gather(*tasks)


async def test_waiting_postpones_the_deadline():
    places, time = HostPlaces(1, 1), in_time()
    deadline = time.deadline
    first = await places.take("a", in_time())
    asyncio.get_running_loop().call_later(0.1, places.give_back, first)
    await places.take("b", time)
    assert time.deadline - deadline == pytest.approx(5.0 - time.wait_s)
    assert time.deadline - deadline >= 0.09


async def test_cancelled_waiter_leaves_no_trace():
    """Also if a place is granted to it in the same moment."""
    places = HostPlaces(1, 1)
    for is_granted in (False, True):
        first = await places.take("a", in_time())
        waiter = asyncio.create_task(places.take("b", in_time()))
        await asyncio.sleep(0)
        if is_granted:
            places.give_back(first)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        if not is_granted:
            places.give_back(first)
    await places.take("c", in_time(wait_s=0.0))


async def test_number_of_waiters_is_bounded():
    places = HostPlaces(1, 1)
    await places.take("a", in_time())
    waiters = [asyncio.create_task(places.take("a", in_time())) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(MediaOverloaded):
        await places.take("b", in_time())
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)


async def test_slow_holders_are_ended_only_for_waiting_hosts():
    places, ended = HostPlaces(4, 4, min_rate_bytes_per_s=100.0, grace_s=0.1), []

    async def hold(host, num_bytes=0):
        try:
            async with places.hold(host, in_time()) as place:
                place.num_bytes = num_bytes
                await asyncio.Event().wait()
        except MediaOverloaded:
            ended.append(host)

    tasks = [asyncio.create_task(hold(*each)) for each in (("slow",), ("slow",), ("fast", 1_000_000), ("one",))]
    await asyncio.sleep(0.5)  # time: in which slowness must have no effect
    assert ended == []
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(places.hold("new", in_time()))
        assert ended == ["slow"]
        await stack.enter_async_context(places.hold("other", in_time()))
        assert sorted(ended) in (["one", "slow"], ["slow", "slow"])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_deadline_is_not_called_overload():
    with pytest.raises(TimeoutError):
        async with HostPlaces(1, 1).hold("a", FetchTime(0.0, 1.0)):
            await asyncio.Event().wait()
