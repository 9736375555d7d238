"""The store's side of the nixl mover, over real processes with a fake of NIXL that reads through /proc."""

import asyncio
import gc
import logging
import os
import signal

import msgspec
import pytest

from medialane.arena import ENTRY_HEADER_BYTES
from medialane.transfer import StillWriting
from medialane.transfer.nixl import mover as mover_module
from medialane.types.errors import TransferFailed
from medialane.types.tensor import TensorDescriptor, TensorSpec
from nixl_hosts import FAKE, MIB, Host
from waiting import eventually, iterations

DATA = os.urandom(100_000)
SHORT_S = 0.2


@pytest.fixture
async def hosts():
    made = []

    def make(factory=FAKE, **settings):
        made.append(Host(factory=factory, **settings))
        return made[-1]

    yield make
    for host in made:
        await host.close()
    gc.collect()  # a traceback references frames, which reference views of the arena


@pytest.fixture
async def owner(hosts):
    return hosts()


@pytest.fixture
async def reader(hosts):
    return hosts()


async def given_up_read(reader, opened):
    """Read from a stopped owner; return the destination and what ends when it may be reused."""
    destination = reader.destination(opened.entry.range.nbytes - 64)
    with pytest.raises(StillWriting) as raised:
        await reader.mover.read(opened, destination, deadline_s=SHORT_S)
    return destination, raised.value.ended


async def test_payload_is_copied_and_nothing_else(owner, reader):
    opened = await owner.opened(DATA)
    before, destination, after = (reader.destination(len(DATA)) for _ in range(3))
    await reader.mover.read(opened, destination, deadline_s=10)
    assert destination.payload == DATA
    assert not any(before.payload)
    assert not any(after.payload)
    assert reader.arena.view.entry(destination.range), "its header is its own"


async def test_processes_are_started_when_they_are_first_needed(owner, reader):
    assert owner.mover.pid is reader.mover.pid is None
    opened = await owner.opened(DATA)
    assert owner.mover.pid
    assert reader.mover.pid is None
    await reader.read(opened)
    assert reader.mover.pid


async def test_start_of_the_process_does_not_count_for_a_published_image(hosts, owner):
    data, reader = b"pixels" * 1000, hosts(factory="fake_nixl:slow_agent")
    with owner.arena.reserve(len(data)) as reservation:
        reservation.buffer[:] = data
        spec = TensorSpec("uint8", (len(data),))
        published = await owner.mover.publish([TensorDescriptor(spec, reservation.range, ENTRY_HEADER_BYTES)])
        destination = reader.destination(len(data))
        tensor = TensorDescriptor(spec, destination.range, ENTRY_HEADER_BYTES)
        await reader.mover.read_published(published.metadata, [tensor], deadline_s=2)
        published.completed.cancel()
    assert destination.payload == data


async def test_concurrent_calls_start_one_process(owner):
    offers = await asyncio.gather(*(owner.mover.offer(wait=True) for _ in range(3)))
    assert offers[0] == offers[1] == offers[2] is not None


async def test_cancelled_call_does_not_end_the_start_of_the_process(owner):
    call = asyncio.create_task(owner.mover.offer(wait=True))
    await iterations(3)
    call.cancel()
    await asyncio.wait([call])
    await eventually(lambda: owner.mover.pid)


async def test_empty_payload_is_not_read(owner, reader):
    opened = await owner.opened(b"")
    assert await reader.read(opened) == b""
    assert reader.mover.pid is None


async def test_more_reads_than_threads_all_end(owner, reader):
    opened = await owner.opened(DATA)
    found = await asyncio.gather(*(reader.read(opened) for _ in range(100)))
    assert all(data == DATA for data in found)


async def test_entry_that_was_freed_is_not_read(owner, reader):
    opened = await owner.opened(DATA)
    owner.free_last()
    with pytest.raises(TransferFailed, match="not the one that was handed out"):
        await reader.read(opened)


async def test_late_bytes_arrive_only_in_the_destination(owner, reader):
    opened = await owner.opened(DATA)
    await reader.read(opened)
    owner.stop()
    destination, ended = await given_up_read(reader, opened)
    assert reader.mover.child.num_reads == 1
    assert not ended.done()
    owner.resume()
    await asyncio.wait_for(ended, 10)
    assert reader.mover.child.num_reads == 0
    assert destination.payload == DATA, "the hazard that the quarantine is for"


async def test_nothing_arrives_after_the_mover_process_was_killed(owner, reader):
    opened = await owner.opened(DATA)
    await reader.read(opened)
    owner.stop()
    destination, ended = await given_up_read(reader, opened)
    reader.kill()
    await asyncio.wait_for(ended, 10)
    destination.payload[:] = canary = os.urandom(len(DATA))
    owner.resume()
    await asyncio.sleep(0.3)  # time: in which the bytes would arrive
    assert destination.payload == canary


async def test_process_is_restarted_when_too_many_bytes_may_still_be_written(hosts, owner, caplog):
    reader = hosts(max_given_up_bytes=2 * len(DATA))
    opened = await owner.opened(DATA)
    await reader.read(opened)
    pid = reader.mover.pid
    owner.stop()
    ends = [(await given_up_read(reader, opened))[1] for _ in range(2)]
    assert reader.mover.pid == pid
    assert not any(ended.done() for ended in ends)
    with caplog.at_level(logging.WARNING):
        _, third = await given_up_read(reader, opened)
    async with asyncio.timeout(10):
        await asyncio.gather(*ends, third)
    assert "3 reads of 300000 bytes have not ended" in caplog.text
    owner.resume()
    assert await reader.read(opened) == DATA
    assert reader.mover.pid != pid


async def test_process_is_restarted_when_too_many_reads_are_stuck(hosts, owner):
    reader = hosts(max_given_up=1)
    opened = await owner.opened(DATA)
    await reader.read(opened)
    owner.stop()
    _, first = await given_up_read(reader, opened)
    _, second = await given_up_read(reader, opened)
    async with asyncio.timeout(10):
        await asyncio.gather(first, second)


async def test_cancelled_read_reports_that_its_destination_may_be_written(owner, reader):
    opened = await owner.opened(DATA)
    await reader.read(opened)
    owner.stop()
    read = asyncio.create_task(reader.mover.read(opened, reader.destination(len(DATA)), deadline_s=10))
    await eventually(lambda: reader.mover.child and reader.mover.child.num_reads)
    read.cancel()
    with pytest.raises(StillWriting) as raised:
        await read
    owner.resume()
    await asyncio.wait_for(raised.value.ended, 10)


async def test_cancelled_reads_do_not_restart_the_process_before_their_deadline(hosts, owner):
    reader = hosts(max_given_up_bytes=1)
    opened = await owner.opened(DATA)
    await reader.read(opened)
    pid = reader.mover.pid
    owner.stop()
    read = asyncio.create_task(reader.mover.read(opened, reader.destination(len(DATA)), deadline_s=10))
    await eventually(lambda: reader.mover.child and reader.mover.child.num_reads)
    read.cancel()
    await asyncio.wait([read])
    owner.resume()
    await asyncio.wait_for(read.exception().ended, 10)
    assert reader.mover.pid == pid


async def test_read_from_an_owner_that_was_killed_fails_and_the_next_one_is_read(owner, reader):
    opened = await owner.opened(DATA)
    await reader.read(opened)
    owner.kill()
    await eventually(lambda: owner.mover.pid is None)
    with pytest.raises(TransferFailed) as raised:
        await reader.read(opened)
    assert not isinstance(raised.value, StillWriting)
    await eventually(lambda: owner.mover.offer(wait=True), "after the pause between two starts")
    assert await reader.read(await owner.opened(DATA)) == DATA


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
async def test_reads_fail_when_the_mover_process_has_exited(owner, reader, number):
    opened = await owner.opened(DATA)
    await reader.read(opened)
    pid = reader.mover.pid
    owner.stop()
    read = asyncio.create_task(reader.mover.read(opened, reader.destination(len(DATA)), deadline_s=10))
    await eventually(lambda: reader.mover.child and reader.mover.child.num_reads)
    os.kill(pid, number)
    with pytest.raises(TransferFailed, match="has exited") as raised:
        await read
    assert not isinstance(raised.value, StillWriting)
    assert reader.mover.pid is None, "it has been reaped"
    owner.resume()
    assert await reader.read(opened) == DATA
    assert reader.mover.pid not in (None, pid)


async def test_process_that_keeps_failing_is_restarted_after_a_growing_pause(owner, reader):
    opened = await owner.opened(DATA)
    for _ in range(3):  # to a pause of 2 s, which a slow start does not use up
        await eventually(lambda: reader.mover.offer(wait=True))
        reader.kill()
        await eventually(lambda: reader.mover.pid is None)
    with pytest.raises(TransferFailed, match="restarted later"):
        await reader.read(opened)
    await eventually(lambda: reader.mover.offer(wait=True))
    assert await reader.read(opened) == DATA


async def test_missing_nixl_is_logged_once_and_nothing_is_offered(hosts, owner, caplog):
    reader = hosts(factory="no_such_module:Agent")
    opened = await owner.opened(DATA)
    with caplog.at_level(logging.WARNING):
        assert [await reader.mover.offer(wait=True) for _ in range(3)] == [None] * 3
    for _ in range(2):
        with pytest.raises(TransferFailed, match="no_such_module"):
            await reader.read(opened)
    assert len(caplog.records) == 1
    assert "NIXL cannot be used on this host" in caplog.text


@pytest.mark.parametrize("offer", [b"", b"garbage", b"\x82\xa8metadata\xa1x\xa4base\x00"])
async def test_invalid_offer_fails_the_read(owner, reader, offer):
    opened = await owner.opened(DATA)
    opened.offers["nixl"] = offer
    with pytest.raises(TransferFailed):
        await reader.read(opened)


@pytest.mark.parametrize("address", [-5, 0, 1, 64, 1 << 64])
async def test_offer_of_an_impossible_address_fails_the_read_and_not_the_process(owner, reader, address):
    """`address` is that of the payload; its header is 64 bytes before it."""
    opened = await owner.opened(DATA)
    await reader.read(opened)
    pid = reader.mover.pid
    base = address - 64 - opened.entry.range.offset
    opened.offers["nixl"] = msgspec.msgpack.encode({"metadata": b"x", "base": base})
    with pytest.raises(TransferFailed):
        await reader.read(opened)
    assert reader.mover.pid == pid


async def test_source_without_an_offer_fails_the_read(owner, reader):
    opened = await owner.opened(DATA)
    opened.offers.clear()
    with pytest.raises(TransferFailed):
        await reader.read(opened)


async def test_peers_that_are_not_used_are_forgotten(hosts, reader, monkeypatch):
    monkeypatch.setattr(mover_module, "MAX_PEERS", 1)
    owners = [hosts(size_bytes=16 * MIB) for _ in range(3)]
    for host in [*owners, *owners]:
        assert await reader.read(await host.opened(DATA)) == DATA
    assert reader.mover.child.num_peers == 1


async def test_process_ends_when_its_channel_is_closed(owner):
    await owner.mover.offer(wait=True)
    await owner.mover.close()
    assert owner.mover.pid is None
