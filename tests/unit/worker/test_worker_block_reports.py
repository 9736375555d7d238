import logging

import msgspec
import numpy as np
import pytest

from fake_engine import FAKE_CARD
from medialane.types.kv_blocks import AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch, prompt_block_ids
from medialane.worker.block_table import BlockReports
from waiting import eventually

SIZE = FAKE_CARD.block_size


def batch(number, *, rank=0, parent=None, time_s=1.0):
    """One block, of its own for each number."""
    event = BlockStored([number], parent, [number] * SIZE, SIZE, medium="GPU", group_idx=0)
    return KvEventBatch(rank, [event], time_s)


def id_of(number):
    return int(prompt_block_ids([number] * SIZE, block_size=SIZE)[0])


@pytest.fixture
async def reports():
    reports = BlockReports(msgspec.structs.replace(FAKE_CARD, data_parallel_size=2))
    yield reports
    reports.close()


def ids(data):
    return set(np.frombuffer(data, "<u8").tolist())


async def test_events_within_milliseconds_are_batched():
    heard = []
    reports = BlockReports(FAKE_CARD, clock=lambda: 10.25)
    reports.watch(heard.append)
    for number in range(5):
        reports.apply(batch(number, time_s=10.0 + number))
    assert heard == []
    await eventually(lambda: heard)
    (change,) = heard
    assert ids(change.stored) == {id_of(n) for n in range(5)}
    assert (change.rank, change.age_s, change.snapshot) == (0, 0.25, False)


async def test_blocks_that_depend_on_later_tokens_are_not_reported(reports, caplog):
    """vLLM 0.33 with speculative decoding: equal tokens may be another block."""
    heard = []
    reports.watch(heard.append)
    for number in range(3):
        (event,) = batch(number).events
        reports.apply(KvEventBatch(0, [msgspec.structs.replace(event, lookahead_token_ids=[[7]])]))
    assert reports.held() == {0: [], 1: []}
    assert (reports.has_unknown_blocks, heard) == (True, [])
    assert caplog.text.count("without regard to its KV cache") == 1


async def test_ranks_are_distinguished(reports):
    heard = []
    reports.watch(heard.append)
    reports.apply(batch(1, rank=0))
    reports.apply(batch(1, rank=1))
    assert reports.held() == {0: [id_of(1)], 1: [id_of(1)]}
    assert [change.rank for change in heard] == [0, 1]


async def test_snapshot_notifies_listeners_of_pending_changes_first(reports):
    """Otherwise an earlier change would be reported after the snapshot that contains it."""
    heard = []
    reports.watch(heard.append)
    reports.apply(batch(1))
    held = reports.held()
    assert held == {0: [id_of(1)], 1: []}
    assert len(heard) == 1
    reports.apply(batch(2))
    await eventually(lambda: len(heard) == 2)
    assert ids(heard[1].stored) == {id_of(2)}


async def test_listeners_receive_changes_only_while_subscribed(reports):
    heard = []
    reports.apply(batch(1))
    unwatch = reports.watch(heard.append)
    reports.apply(batch(2))
    reports.held()
    assert [ids(change.stored) for change in heard] == [{id_of(2)}]
    unwatch()
    reports.apply(batch(3))
    reports.held()
    assert len(heard) == 1


async def test_many_events_are_flushed_immediately(reports):
    heard = []
    reports.watch(heard.append)
    reports.apply(KvEventBatch(0, [BlockRemoved([n]) for n in range(5000)] + list(batch(1).events)))
    assert len(heard) == 1


async def test_clear_is_a_snapshot(reports):
    heard = []
    reports.watch(heard.append)
    reports.apply(batch(1))
    reports.apply(KvEventBatch(0, [AllBlocksCleared()]))
    assert reports.held()[0] == []
    assert (heard[-1].snapshot, heard[-1].stored) == (True, b"")


async def test_unsupported_events_are_logged_with_rate_limiting(reports, caplog):
    caplog.set_level(logging.WARNING)
    for number in range(100):
        reports.apply(batch(number, parent=10**6))
        reports.held()
    assert 0 < len(caplog.messages) < 10
    assert "64 with an unknown parent" in caplog.messages[-1]


async def test_unknown_rank_is_logged(reports, caplog):
    reports.apply(batch(1, rank=7))
    assert "rank 7" in caplog.text
    assert reports.held() == {0: [], 1: []}
