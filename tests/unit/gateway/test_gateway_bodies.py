"""Request body buffers: reuse, byte budget, minimum data rate."""

import asyncio

import pytest

from medialane.gateway import GatewayConfig
from medialane.gateway.intake import BodyBuffer, BodyMemory, BoundedReceive, BudgetCharge
from medialane.types.errors import BodyMemoryExhausted, BodyTooLarge, ClientTooSlow, ConcurrencyLimitExceeded
from waiting import eventually

CONFIG = GatewayConfig()
MEMORY = BodyMemory(CONFIG.max_bodies_bytes)


def sender(*pieces, leaves=False):
    messages = [
        {"type": "http.request", "body": piece, "more_body": leaves or n < len(pieces) - 1}
        for n, piece in enumerate(pieces)
    ]

    async def receive():
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    return receive


@pytest.mark.parametrize("declared", [0, 10, 300_000, 3_000_000])
async def test_body_is_read_completely_whatever_its_content_length(fairness, declared):
    pieces = [bytes([n]) * 100_000 for n in range(30)]
    body = BodyBuffer(MEMORY, declared)
    assert await body.read(sender(*pieces), fairness)
    assert body.buffer[: body.size] == b"".join(pieces)


async def test_client_disconnect_is_reported(fairness):
    assert not await BodyBuffer(MEMORY, 100).read(sender(b"abc", leaves=True), fairness)


async def test_pieces_that_arrive_together_are_admitted_over_several_iterations(fairness):
    """The server may read all connections in one iteration."""
    ended = []

    async def read():
        await BodyBuffer(MEMORY, 0).read(sender(b"x" * 64_000), fairness)
        ended.append(ticks)

    ticks, reading = 0, asyncio.gather(*(read() for _ in range(20)))
    while not reading.done():
        ticks += 1
        await asyncio.sleep(0)
    assert max(ended.count(tick) for tick in ended) <= 2


async def test_body_of_declared_length_is_never_reallocated(fairness):
    body = BodyBuffer(MEMORY, 1_000_000)
    first = body.buffer
    assert await body.read(sender(*[b"x" * 100_000] * 10), fairness)
    assert body.buffer is first


async def test_buffer_is_reused():
    buffers = BodyMemory(16 << 20)
    first = buffers.take(1_000_000)
    buffers.release(first)
    assert buffers.take(900_000) is first
    assert buffers.take(900_000) is not first


async def test_buffer_with_live_views_is_not_reused():
    buffers = BodyMemory(16 << 20)
    first = buffers.take(1_000_000)
    view = memoryview(first)[10:20]
    buffers.release(first)
    assert buffers.take(1_000_000) is not first
    assert bytes(view) == bytes(10)


async def test_unused_buffers_are_bounded_by_a_share_of_the_budget():
    memory = BodyMemory(4 << 20)
    taken = [memory.take(1 << 19) for _ in range(5)]
    for buffer in taken:
        memory.release(buffer)
    await eventually(lambda: [buffer.closed for buffer in taken] == [False, False, True, True, True])


async def test_unused_buffers_and_charges_together_are_within_the_budget():
    memory = BodyMemory(4 << 20)
    unused = [memory.take(1 << 19) for _ in range(2)]
    for buffer in unused:
        memory.release(buffer)
    charge = BudgetCharge(memory)
    charge.set(3 << 20)
    assert memory.take(1 << 19) is unused[1], "both fit"
    memory.release(unused[1])
    charge.set(4 << 20)
    await eventually(lambda: unused[0].closed and unused[1].closed)
    late = memory.take(1 << 19)
    memory.release(late)
    await eventually(lambda: late.closed)
    charge.release()


async def test_buffers_that_are_not_used_for_a_while_are_unmapped():
    memory = BodyMemory(CONFIG.max_bodies_bytes, idle_s=0.01)
    buffers = [memory.take(size) for size in (1 << 16, 1 << 19, 1 << 20)]
    for buffer in buffers:
        memory.release(buffer)
    await eventually(lambda: all(buffer.closed for buffer in buffers))


def test_out_of_memory_is_an_overload():
    with pytest.raises(BodyMemoryExhausted):
        BodyMemory(1 << 20).take(1 << 60)


def test_refused_body_is_sent_away_until_memory_is_expected_to_be_free():
    now = 0.0
    budget = BodyMemory(100, clock=lambda: now)
    charge = BudgetCharge(budget)
    charge.set(100)
    now = 30.0
    charge.release()
    charge.set(100)
    with pytest.raises(BodyMemoryExhausted) as raised:
        BudgetCharge(budget).set(1)
    assert raised.value.retry_after_s == 30


def test_budget_is_shared_and_released_once():
    budget = BodyMemory(100)
    first, second = BudgetCharge(budget), BudgetCharge(budget)
    first.set(60)
    second.set(40)
    with pytest.raises(BodyMemoryExhausted) as raised:
        second.set(41)
    assert raised.value.retry_after_s == 1
    first.set(10)
    second.set(90)
    for charge in (first, second, first, second):
        charge.release()
    assert budget.num_bytes == 0


async def test_body_over_the_limit_is_rejected():
    receive = BoundedReceive(sender(b"a" * 60, b"a" * 60), 100, BudgetCharge(BodyMemory(1000)), CONFIG)
    await receive()
    with pytest.raises(BodyTooLarge):
        await receive()


async def test_slow_client_times_out_by_its_data_rate():
    config = GatewayConfig(min_body_rate_bytes_per_s=1000, min_body_rate_grace_s=0.05)
    messages = [{"type": "http.request", "body": b"a" * 100, "more_body": True}] * 3

    async def receive():
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    incoming = BoundedReceive(receive, 10_000, BudgetCharge(BodyMemory(10_000)), config)
    for _ in range(3):
        await incoming()
    started = asyncio.get_running_loop().time()
    with pytest.raises(ClientTooSlow):
        await incoming()
    assert asyncio.get_running_loop().time() - started > 0.2  # 300 bytes may take 0.35 s


async def test_server_side_time_does_not_count_against_the_client():
    config = GatewayConfig(body_timeout_s=0.1)
    incoming = BoundedReceive(sender(*[b"a"] * 4), 100, BudgetCharge(BodyMemory(100)), config)
    for _ in range(4):
        assert (await incoming())["body"] == b"a"
        await asyncio.sleep(0.05)  # time: the server's, in all more than the timeout


async def test_waiting_for_a_disconnect_has_no_timeout():
    left = asyncio.Event()

    async def receive():
        if not left.is_set():
            left.set()
            return {"type": "http.request", "body": b"", "more_body": False}
        await asyncio.sleep(0.1)  # time: more than the timeout
        return {"type": "http.disconnect"}

    incoming = BoundedReceive(receive, 100, BudgetCharge(BodyMemory(100)), GatewayConfig(body_timeout_s=0.05))
    await incoming()
    assert (await incoming())["type"] == "http.disconnect"


def test_tenant_has_a_share_of_the_memory_and_others_go_on():
    memory = BodyMemory(100, tenant_share=0.6)
    first, second, other = BudgetCharge(memory, "ann"), BudgetCharge(memory, "ann"), BudgetCharge(memory, "ben")
    first.set(40)
    second.set(20)
    with pytest.raises(ConcurrencyLimitExceeded, match="its share") as refused:
        second.set(21)
    assert refused.value.retry_after_s
    other.set(40)
    first.release()
    second.set(60)
    second.release()
    other.release()
    assert memory.num_bytes == 0
