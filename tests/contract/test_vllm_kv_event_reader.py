"""vLLM's own publisher of KV events, read by ours: nothing is lost that it can replay, and losses are reported."""

import logging
import os
import stat
import time

import pytest
from vllm.distributed import kv_events as vllm_events

from medialane.types.kv_blocks import AllBlocksCleared, BlockRemoved, BlockStored
from medialane.vllm_bridge.engine import kv_events
from waiting import eventually

DEADLINE_S = 10.0


class Ranks:
    """Publishers as created by EngineCores, and what a reader reported."""

    def __init__(self, folder, num_ranks=1, *, silence_s=2.0, **settings):
        self.reader = kv_events.KvEventReader(folder, silence_s=silence_s)
        config = self.reader.config
        vars(config).update(settings)
        self.publishers = [vllm_events.EventPublisherFactory.create(config, rank) for rank in range(num_ranks)]
        self.batches = []

    @property
    def sources(self):
        return {rank: publisher.get_publisher_config() for rank, publisher in enumerate(self.publishers)}

    def start(self):
        self.reader.start(self.sources, self.batches.append)

    def publish(self, *numbers, rank=0):
        for n in numbers:
            self.publishers[rank].publish(vllm_events.KVEventBatch(ts=time.time(), events=[removed(n)]))

    def lose(self, *numbers):
        """The batches of these numbers are lost on the way."""
        (publisher,) = self.publishers
        publisher._pub = Lossy(publisher._pub, set(numbers))  # vLLM's socket: its publisher has no other door

    def numbers(self, rank=0):
        """The numbers of one rank; None where it was cleared."""
        events = [event for batch in self.batches if batch.rank == rank for event in batch.events]
        return [None if isinstance(e, AllBlocksCleared) else e.block_hashes[0] for e in events]

    async def until(self, expected, rank=0):
        await eventually(lambda: self.numbers(rank) == expected)

    async def close(self):
        await self.reader.close()
        for publisher in self.publishers:
            publisher.shutdown()


def folder_of(reader):
    return os.path.dirname(reader.config.endpoint.removeprefix("ipc://"))


def removed(n):
    return vllm_events.BlockRemoved(block_hashes=[n], medium="GPU", group_idx=0)


@pytest.fixture
async def open_ranks(private_folder):
    opened = []

    def make(*args, **settings):
        opened.append(Ranks(private_folder().path, *args, **settings))
        return opened[-1]

    yield make
    for ranks in opened:
        await ranks.close()


async def test_events_are_read_with_their_fields(open_ranks):
    ranks = open_ranks()
    ranks.start()
    stored = vllm_events.BlockStored(
        block_hashes=[7, 2**64 - 1],
        parent_block_hash=5,
        token_ids=[1, 2, 3, 4],
        block_size=2,
        lora_id=1,
        medium="GPU",
        lora_name="l",
        extra_keys=[("l", ("a" * 64, -3), "salt"), None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        session_id="s",
    )
    events = [stored, removed(7), vllm_events.AllBlocksCleared()]
    before = time.time()
    ranks.publishers[0].publish(vllm_events.KVEventBatch(ts=before, events=events))
    await eventually(lambda: ranks.batches)
    (batch,) = ranks.batches
    assert (batch.rank, batch.time_s) == (0, before)
    ours, gone, cleared = batch.events
    assert ours == BlockStored(
        [7, 2**64 - 1],
        5,
        [1, 2, 3, 4],
        2,
        medium="GPU",
        lora_name="l",
        extra_keys=[["l", ["a" * 64, -3], "salt"], None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    assert gone == BlockRemoved([7], medium="GPU", group_idx=0)
    assert cleared == AllBlocksCleared()


async def test_events_published_before_the_subscription_are_read(open_ranks):
    ranks = open_ranks()
    ranks.publish(1, 2, 3)
    ranks.start()
    await ranks.until([1, 2, 3])
    ranks.publish(4)
    await ranks.until([1, 2, 3, 4])


async def test_each_rank_has_its_own_endpoint(open_ranks):
    ranks = open_ranks(3)
    ranks.start()
    for rank in range(3):
        ranks.publish(rank, 10 + rank, rank=rank)
    for rank in range(3):
        await ranks.until([rank, 10 + rank], rank)
    assert len({source.endpoint for source in ranks.sources.values()}) == 3


async def test_publisher_uses_a_private_folder_and_no_tcp_port(open_ranks):
    ranks = open_ranks(2)
    folder = folder_of(ranks.reader)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    for source in ranks.sources.values():
        assert source.endpoint.startswith(f"ipc://{folder}/")
        assert source.replay_endpoint.startswith(f"ipc://{folder}/")
    ranks.start()
    ranks.publish(1)
    await ranks.until([1])


class Lossy:
    """A publisher's PUB socket that drops some batches."""

    def __init__(self, inner, lost):
        self._inner = inner
        self._lost = lost

    def send_multipart(self, frames):
        if int.from_bytes(frames[1], "big") not in self._lost:
            self._inner.send_multipart(frames)

    def close(self, linger=0):
        self._inner.close(linger=linger)


async def test_gap_is_filled_from_the_replay_buffer(open_ranks):
    ranks = open_ranks()
    ranks.lose(1, 2, 4)
    ranks.start()
    for *lost, received in ([0], [1, 2, 3], [4, 5]):
        ranks.publish(*lost, received)
        await ranks.until(list(range(received + 1)))
    assert ranks.reader.ranks[0].num_lost == 0


async def test_batch_lost_before_an_idle_period_is_replayed(open_ranks):
    ranks = open_ranks(silence_s=0.1)
    ranks.lose(1)
    ranks.start()
    ranks.publish(0)
    await ranks.until([0])
    ranks.publish(1)
    await ranks.until([0, 1])


async def test_batches_that_cannot_be_replayed_clear_the_cache(open_ranks, caplog):
    caplog.set_level(logging.WARNING, "medialane")  # libraries set the root logger's
    ranks = open_ranks(buffer_steps=2)
    ranks.lose(*range(1, 9))
    ranks.start()
    ranks.publish(0)
    await ranks.until([0])
    ranks.publish(*range(1, 10))
    await ranks.until([0, None, 8, 9])
    assert ranks.reader.ranks[0].num_lost == 1
    assert "lost" in caplog.text


async def test_undecodable_batch_counts_as_lost(open_ranks):
    ranks = open_ranks()
    ranks.start()
    ranks.publish(0)
    await ranks.until([0])
    ranks.publishers[0].publish(vllm_events.EventBatch(ts=0.0, events=[{"type": "Other"}]))
    ranks.publish(2)
    await ranks.until([0, None, 2])


async def test_reader_that_fails_clears_the_cache_and_reads_everything_again(open_ranks, caplog):
    ranks = open_ranks()
    faults = []

    def listener(batch):
        if faults:
            raise faults.pop()
        ranks.batches.append(batch)

    ranks.reader.start(ranks.sources, listener)
    ranks.publish(0)
    await ranks.until([0])
    faults.append(RuntimeError("a bug"))
    ranks.publish(1)
    await ranks.until([0, None, 0, 1])
    assert "has ended unexpectedly" in caplog.text


async def test_restarted_sequence_numbers_clear_the_cache(open_ranks):
    ranks = open_ranks()
    ranks.start()
    ranks.publish(0)
    await ranks.until([0])
    ranks.publish(1)
    await ranks.until([0, 1])
    publisher = ranks.publishers[0]
    publisher._seq_gen = iter(range(100))  # vLLM's own: as after a restart
    publisher._buffer.clear()  # likewise
    ranks.publish(2)
    await ranks.until([0, 1, None, 2])


async def test_many_events_arrive_in_chunks_in_order(open_ranks):
    ranks = open_ranks()
    ranks.start()
    events = [removed(n) for n in range(5000)]
    ranks.publishers[0].publish(vllm_events.KVEventBatch(ts=0.0, events=events))
    await ranks.until(list(range(5000)))
    assert max(len(batch.events) for batch in ranks.batches) <= kv_events.MAX_EVENTS_AT_ONCE


def test_end_marker_equals_vllms():
    assert vllm_events.ZmqEventPublisher.END_SEQ == kv_events.END
