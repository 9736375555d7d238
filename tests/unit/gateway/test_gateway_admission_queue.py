"""Who is served next, who is refused, and what is left behind, by a resource that takes one request at a time."""

import asyncio
import time
import tracemalloc
from collections import Counter

import pytest

from medialane.gateway.admission import AdmissionQueue, Flow, QueuedRequest, QueueLimits, SharedCounts
from medialane.types.errors import QueueFull, QueueTimeout


class Resource:
    """Takes a request when it has none; `serve` ends it, and `served` are the names of those it had, in order."""

    def __init__(self, *, max_requests=1000, max_bytes=1 << 30, clock=time.monotonic, counts=None):
        limits = QueueLimits(max_requests, max_bytes, counts or SharedCounts())
        self.queue = AdmissionQueue("engine", limits, lambda num_unsent: not num_unsent, clock=clock)
        self._clock = clock
        self._flows = {}
        self.served = []
        self._tickets = []

    async def ask(self, name, tokens=10, *, tenant="", priority=0, is_media=False, timeout_s=1000.0, **more):
        if len(self._flows) > 100:
            self._flows.clear()
        flow = self._flows.setdefault((tenant, is_media), Flow(tenant, is_media=is_media))
        request = QueuedRequest(flow, priority, tokens, self._clock() + timeout_s, **more)
        self._tickets.append(await self.queue.admit(request))
        self.served.append(name)

    async def asking(self, *args, **kwargs):
        """A task of a request that has begun to wait, or is served."""
        task = asyncio.create_task(self.ask(*args, **kwargs))
        await asyncio.sleep(0)
        return task

    def end(self):
        self._tickets.pop().sent()

    async def serve(self, number=1):
        for _ in range(number):
            self.end()
            for _ in range(3):
                await asyncio.sleep(0)

    @property
    def is_idle(self):
        return not self.queue.num_waiting and not any(len(flow.lanes["engine"]) for flow in self._flows.values())


async def busy(**limits):
    """A resource that has a request."""
    resource = Resource(**limits)
    await resource.ask("busy")
    resource.served.clear()
    return resource


async def test_request_is_admitted_at_once_while_there_is_room():
    resource = Resource()
    for name in "abc":
        await resource.ask(name)
        await resource.serve()
    assert resource.served == ["a", "b", "c"]


async def test_lower_priority_is_served_first_and_then_the_earliest_deadline():
    resource = await busy()
    tasks = [
        await resource.asking("late", timeout_s=500),
        await resource.asking("unimportant", priority=5, timeout_s=1),
        await resource.asking("early", timeout_s=400),
        await resource.asking("urgent", priority=-5),
    ]
    await resource.serve(5)
    await asyncio.gather(*tasks)
    assert resource.served == ["urgent", "early", "late", "unimportant"]


async def test_tenants_share_by_tokens():
    """A video costs what a hundred texts cost: of both tenants the same cost is served."""
    resource = await busy()
    tasks = [await resource.asking("video", 1000, tenant="heavy", is_media=True) for _ in range(20)]
    tasks += [await resource.asking("text", 10, tenant="light") for _ in range(300)]
    await resource.serve(200)
    num_videos = resource.served.count("video")
    assert 2 <= num_videos <= 4
    await resource.serve(121)
    await asyncio.gather(*tasks)
    assert resource.is_idle


async def test_tenant_that_asks_now_and_then_is_served_next_under_a_flood_of_another():
    resource = await busy()
    tasks = [await resource.asking("video", 500, tenant="heavy", is_media=True) for _ in range(50)]
    await resource.serve(5)
    for _ in range(10):
        text = await resource.asking("text", 10, tenant="light")
        await resource.serve()
        assert text.done()
        await resource.serve(2)
    await resource.serve(26)
    await asyncio.gather(*tasks)


async def test_tenant_cannot_save_up_service():
    """One that has been idle for long does not shut out the others."""
    resource = await busy()
    tasks = [await resource.asking("a", 100, tenant="a") for _ in range(60)]
    await resource.serve(30)
    tasks += [await resource.asking("b", 100, tenant="b") for _ in range(30)]
    resource.served.clear()
    await resource.serve(20)
    assert 9 <= resource.served.count("b") <= 11
    await resource.serve(41)
    await asyncio.gather(*tasks)


async def test_tenant_whose_requests_leave_gaps_gets_its_share():
    """Three at a time, each of which leaves if it is not among the next three: in turns, only two of them would be."""
    resource = await busy()
    tasks = [await resource.asking("often", 100, tenant="often") for _ in range(100)]
    for _ in range(15):
        seldom = [await resource.asking("seldom", 100, tenant="seldom") for _ in range(3)]
        await resource.serve(3)
        for task in seldom:
            task.cancel()
        await asyncio.wait(seldom)
        await resource.serve(3)
    assert 42 <= resource.served.count("seldom") <= 45
    await resource.serve(resource.queue.num_waiting + 1)
    await asyncio.gather(*tasks)


async def test_tenant_that_asked_long_ago_does_not_shut_out_the_others():
    resource = await busy()
    once = await resource.asking("b", 100, tenant="b")
    tasks = [await resource.asking("a", 100, tenant="a") for _ in range(400)]
    await resource.serve(300)
    assert once.done()
    tasks += [await resource.asking("b", 100, tenant="b") for _ in range(100)]
    resource.served.clear()
    await resource.serve(60)
    assert resource.served.count("a") >= 9
    await resource.serve(resource.queue.num_waiting + 1)
    await asyncio.gather(*tasks)


async def test_tenant_that_waits_with_one_request_at_a_time_owes_what_it_has_had():
    """Otherwise each of its videos would count as much as a text."""
    resource = await busy()
    tasks = [await resource.asking("text", 10, tenant="light") for _ in range(300)]
    for _ in range(150):
        if not any(task.get_name() == "video" and not task.done() for task in tasks):
            tasks.append(await resource.asking("video", 1000, tenant="heavy", is_media=True))
            tasks[-1].set_name("video")
        await resource.serve()
    assert resource.served.count("video") <= 3
    await resource.serve(resource.queue.num_waiting + 1)
    await asyncio.gather(*tasks)


async def test_text_of_one_flow_does_not_wait_behind_media():
    resource = await busy()
    tasks = [await resource.asking("video", 1000, is_media=True) for _ in range(10)]
    tasks += [await resource.asking("text", 10) for _ in range(10)]
    await resource.serve(12)
    assert resource.served.count("text") == 10
    await resource.serve(9)
    await asyncio.gather(*tasks)


async def test_urgent_requests_do_not_starve_others():
    resource = await busy()
    tasks = [await resource.asking("urgent", priority=-1) for _ in range(200)]
    tasks.append(await resource.asking("patient", priority=10))
    for _ in range(200 + 2 * 16):
        tasks.append(await resource.asking("urgent", priority=-1))
        await resource.serve()
    assert "patient" in resource.served, "once the earlier ones are served, one of sixteen is the oldest"
    await resource.serve(201)
    await asyncio.gather(*tasks)


async def test_every_sixteenth_is_the_one_that_waits_longest():
    resource = await busy()
    tasks = [await resource.asking("patient", priority=10)]
    tasks += [await resource.asking("urgent", priority=-1) for _ in range(100)]
    await resource.serve(17)
    assert resource.served.count("patient") == 1
    await resource.serve(85)
    await asyncio.gather(*tasks)


async def test_expired_request_leaves_first():
    resource = await busy()
    expiring = await resource.asking("expired", timeout_s=0.05)
    other = await resource.asking("other")
    with pytest.raises(QueueTimeout) as refused:
        await expiring
    assert refused.value.status == 503
    assert refused.value.retry_after_s >= 1
    assert resource.queue.num_waiting == 1
    await resource.serve(2)
    await other
    assert resource.served == ["other"]


async def test_cancelled_request_leaves_at_once():
    resource = await busy()
    cancelled, other = await resource.asking("cancelled"), await resource.asking("other")
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert resource.queue.num_waiting == 1
    await resource.serve(2)
    await other
    assert resource.is_idle


@pytest.mark.parametrize("is_admitted_first", [True, False])
async def test_request_that_is_cancelled_while_it_is_admitted_holds_nothing(is_admitted_first):
    resource = await busy()
    cancelled, other = await resource.asking("cancelled"), await resource.asking("other")
    steps = [resource.end, cancelled.cancel]
    for step in steps if is_admitted_first else reversed(steps):
        step()
    async with asyncio.timeout(5):
        await asyncio.gather(cancelled, return_exceptions=True)
        await other
    assert resource.served == ["other"]
    await resource.serve()
    assert resource.is_idle


async def test_full_queue_refuses_the_newest_of_whom_has_most_waiting():
    resource = await busy(max_requests=4)
    heavy = [await resource.asking(f"heavy {i}", 1000, tenant="heavy") for i in range(4)]
    light = await resource.asking("light", tenant="light")
    with pytest.raises(QueueFull) as refused:
        await heavy[3]
    assert refused.value.retry_after_s >= 1
    with pytest.raises(QueueFull):
        await resource.ask("heavy 4", 1000.0, tenant="heavy")
    await resource.serve(5)
    await asyncio.gather(light, *heavy[:3])
    assert sorted(resource.served) == ["heavy 0", "heavy 1", "heavy 2", "light"]


async def test_full_queue_refuses_the_least_urgent():
    resource = await busy(max_requests=1)
    unimportant = await resource.asking("unimportant", priority=1)
    urgent = await resource.asking("urgent", priority=0)
    with pytest.raises(QueueFull):
        await unimportant
    await resource.serve(2)
    await urgent


async def test_bytes_of_waiting_requests_are_bounded():
    resource = await busy(max_bytes=100)
    small = await resource.asking("small", num_bytes=60)
    with pytest.raises(QueueFull):
        await resource.ask("large", num_bytes=60)
    await resource.serve(2)
    await small
    await resource.asking("small", num_bytes=60)
    await resource.serve()


async def test_prepared_request_is_neither_refused_nor_counted():
    resource = await busy(max_requests=1)
    prepared = await resource.asking("prepared", 1000, timeout_s=100, is_media=True, may_refuse=False)
    text = await resource.asking("text")
    with pytest.raises(QueueFull):
        await resource.ask("too many")
    await resource.serve(3)
    await asyncio.gather(prepared, text)
    assert sorted(resource.served) == ["prepared", "text"]


async def test_prepared_request_is_admitted_without_room_at_its_deadline():
    """It must be served, and later is worse; its tenant is charged as for any other."""
    resource = await busy()
    tasks = [await resource.asking("other", tenant="other"), await resource.asking("text", tenant="media")]
    await resource.ask("prepared", 500, tenant="media", timeout_s=0.01, is_media=True, may_refuse=False)
    assert resource.served == ["prepared"]
    await resource.serve(1)
    assert not any(task.done() for task in tasks)
    await resource.serve(2)
    await asyncio.gather(*tasks)
    assert resource.served == ["prepared", "other", "text"]


async def test_newest_is_served_first_while_not_all_can_be_in_time(clock):
    """Else all of them would be served too late."""
    resource = await busy(clock=clock)
    tasks = [await resource.asking("before", timeout_s=100) for _ in range(6)]
    for _ in range(6):
        clock.now += 1.0
        await resource.serve()
    tasks += [await resource.asking(name, timeout_s=3.2) for name in "abcd"]
    clock.now += 1.0
    await resource.serve(4)
    assert resource.served[6:] == ["d", "c", "a", "b"], "two would have been served in time"
    await resource.serve(1)
    await asyncio.gather(*tasks)


async def test_room_that_appears_by_itself_is_noticed():
    has_room = False
    queue = AdmissionQueue("engine", QueueLimits(10, 1000), lambda _: has_room)
    request = QueuedRequest(Flow("", is_media=False), 0, 1, time.monotonic() + 10)
    waiting = asyncio.create_task(queue.admit(request))
    await asyncio.sleep(0.02)  # time: several ticks
    assert not waiting.done()
    has_room = True
    async with asyncio.timeout(5):
        (await waiting).sent()


async def test_priorities_and_tenants_that_come_once_leave_no_state_that_grows():
    resource = await busy()
    await resource.serve()

    async def many(first, number):
        for i in range(first, first + number):
            await resource.ask("x", tenant=f"tenant {i}", priority=i)
            await resource.serve()
        resource.served.clear()

    await many(0, 1000)
    tracemalloc.start()
    try:
        await many(1000, 500)
        before = tracemalloc.get_traced_memory()[0]
        await many(2000, 2000)
        assert tracemalloc.get_traced_memory()[0] - before < 200_000
    finally:
        tracemalloc.stop()


async def test_limits_are_those_of_all_gateways_of_a_port(tmp_path):
    """However unevenly connections are spread over them."""
    counts = [SharedCounts(str(tmp_path / "counts"), index=index, num_gateways=2) for index in range(2)]
    first, second = [await busy(max_requests=10, counts=each) for each in counts]
    tasks = [await first.asking("a") for _ in range(8)]
    tasks += [await second.asking("b") for _ in range(2)]
    with pytest.raises(QueueFull):
        await second.ask("c")
    await first.serve(9)
    tasks.append(await second.asking("c"))
    await second.serve(4)
    await asyncio.gather(*tasks)


def test_gateways_with_waiting_requests_take_turns(tmp_path):
    counts = [SharedCounts(str(tmp_path / "counts"), index=index, num_gateways=3) for index in range(3)]
    for each in counts:
        each.assign(["x"])

    def turns(every_s):
        """Whose turn it is at times that are `every_s` apart, by gateway."""
        times = [0.5 + every_s * number for number in range(600)]
        return Counter([each.is_turn("x", at, turn_s=1.0) for each in counts].index(True) for at in times)

    assert all(each.is_turn("x", at, turn_s=1.0) for each in counts for at in (0.5, 1.5)), "none waits"
    for each in counts:
        each.set_own("x", 2)
    for every_s in (1.0, 3.0, 6.0):  # a worker that reports in step with the turns
        assert all(150 < turns(every_s)[index] < 250 for index in range(3)), every_s
    for at in (0.5, 1.5, 2.5):
        assert [each.is_turn("x", at, turn_s=1.0) for each in counts].count(True) == 1
    counts[1].set_own("x", 0)
    taken = [counts[2].is_turn("x", at + 0.5, turn_s=1.0) for at in range(600)]
    assert 250 < sum(taken) < 350


async def test_waiting_requests_are_counted_with_their_age_and_the_time_until_they_are_sent(clock):
    resource = await busy(clock=clock)
    stats = resource.queue.stats
    assert (stats().num_requests, stats().oldest_s, stats().expected_s) == (0, 0.0, 0.0)
    tasks = [await resource.asking(name) for name in "abcdefg"]
    for _ in range(5):  # one each second
        clock.now += 1.0
        await resource.serve()
    assert (stats().num_requests, stats().oldest_s) == (2, 5.0)
    assert stats().expected_s == pytest.approx(2.0)
    clock.now += 1.0
    await resource.serve(2)
    await asyncio.gather(*tasks)
    assert (stats().num_requests, stats().oldest_s) == (0, 0.0)


@pytest.mark.parametrize("may_refuse", [True, False])
async def test_request_admitted_in_the_iteration_of_its_deadline_is_served_once(may_refuse):
    resource = await busy()
    task = await resource.asking("prepared", 5, timeout_s=0.3, may_refuse=may_refuse)
    asyncio.get_running_loop().call_later(0.31, resource.end)
    time.sleep(0.35)  # noqa: ASYNC251 - time: the deadline and the room for it come in one iteration of the loop
    async with asyncio.timeout(10):
        await task
    assert resource.served == ["prepared"]
    assert resource.is_idle
    assert resource.queue.num_unsent == 1
    resource.end()
    assert resource.queue.num_unsent == 0
