"""KV blocks over a connection: from a handler to the client's watchers."""

import asyncio

import msgspec
import numpy as np
import pytest
from rpc_reports import Reported
from rpc_requests import engine_request, tokens_of

from medialane.testing.fake_worker import FAKE_CARD, FakeHandler
from medialane.types.errors import ProtocolViolation
from medialane.types.kv_blocks import KvChange
from medialane.wire import KvBlocks, ResyncBlocks
from waiting import eventually

#: In one message.
PIECE_BLOCKS = 2048
#: Made once, outside of any loop.
MANY = dict.fromkeys(range(60 * PIECE_BLOCKS))


class View(Reported):
    """What a gateway knows of the blocks."""

    def __init__(self, client):
        self.held = set()
        super().__init__(client)

    def change(self, slot, change):
        super().change(slot, change)
        stored, removed = (np.frombuffer(data, "<u8").tolist() for data in (change.stored, change.removed))
        self.held = (set() if change.snapshot else self.held - set(removed)) | set(stored)


@pytest.fixture
async def handler(net):
    handler = FakeHandler(card=msgspec.structs.replace(FAKE_CARD, num_kv_blocks=1000))
    await net.serve(handler)
    return handler


async def test_held_blocks_are_sent_immediately_and_then_every_change(net, handler):
    handler.change_blocks([1, 2])
    view = View(await net.connect())
    await eventually(lambda: view.held == {1, 2})
    assert view.changes[0].snapshot
    handler.change_blocks([3], [1])
    await eventually(lambda: view.held == {2, 3})
    handler.change_blocks([7], clear=True)
    await eventually(lambda: view.held == {7})
    assert len(view.changes) == 3


async def test_every_gateway_receives_the_blocks(net, handler):
    views = [View(await net.connect(gateway_id=f"g{i}")) for i in range(3)]
    handler.change_blocks([1])
    await eventually(lambda: [view.held for view in views] == [{1}] * 3)


async def test_updates_before_the_first_watcher_are_kept(net, handler):
    handler.change_blocks([1])
    client = await net.connect()
    handler.change_blocks([2])
    assert await tokens_of(client.requests.submit(engine_request("r"))) == [1, 2, 3]
    view = View(client)
    await eventually(lambda: view.held == {1, 2})


async def test_reconnected_gateway_is_consistent_after_one_snapshot(net, handler):
    handler.change_blocks([1])
    first = await net.connect()
    await first.close()
    await eventually(lambda: handler.block_listeners == [])
    handler.change_blocks([2], [1])
    view = View(await net.connect())
    await eventually(lambda: view.held == {2})
    assert len(view.changes) == 1


async def test_lost_connection_receives_no_updates(net, handler):
    client = await net.connect()
    view = View(client)
    await eventually(lambda: view.changes)
    await client.close()
    await eventually(lambda: handler.block_listeners == [])
    handler.change_blocks([1])
    assert view.held == set()


async def test_many_blocks_do_not_block_either_event_loop(net, handler):
    handler.blocks = MANY
    client = await net.connect()
    rounds = 0
    seen = []

    def tick():
        nonlocal rounds
        rounds += 1
        if not client.closed.is_set():
            asyncio.get_running_loop().call_soon(tick)

    tick()
    Reported(client).change = lambda _slot, change: seen.append((rounds, len(change.stored) // 8))
    await eventually(lambda: sum(count for _, count in seen) == len(MANY))
    assert max(count for _, count in seen) == PIECE_BLOCKS
    assert len({when for when, _ in seen}) == len(seen)
    await client.close()


async def test_outputs_are_not_delayed_by_many_blocks(net, handler):
    handler.blocks = MANY
    client = await net.connect()
    changes = Reported(client).changes
    assert await tokens_of(client.requests.submit(engine_request("r"))) == [1, 2, 3]
    assert len(changes) < 60
    await client.close()


async def test_worker_sends_a_new_snapshot_on_request(net, handler, raw):
    handler.change_blocks([1])
    gateway = await raw()
    assert (await gateway.next(KvBlocks)).change.snapshot
    gateway.send(ResyncBlocks())
    assert (await gateway.next(KvBlocks)).change.snapshot


@pytest.mark.parametrize("change", [KvChange(3, b"", b""), KvChange(0, b"1234567", b"")])
async def test_invalid_blocks_close_the_connection(net, handler, change):
    client = await net.connect()
    view = View(client)
    await eventually(lambda: view.changes)
    client.reports.received(KvBlocks(view.changes[0]))
    with pytest.raises(ProtocolViolation, match="KV blocks"):
        client.reports.received(KvBlocks(change))


async def test_load_reports_reach_the_gateway(net, handler):
    view = View(await net.connect())
    await eventually(lambda: len(view.loads) > 1)
