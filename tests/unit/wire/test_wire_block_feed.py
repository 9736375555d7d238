"""A worker's feed and a gateway's inbox: both converge after any delay or overflow."""

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from medialane.gateway.workers.reports import MAX_WAITING_BYTES, BlockInbox
from medialane.types.kv_blocks import KvChange
from medialane.wire import HEADER, KvBlocks, decode_from_worker
from medialane.worker.reports import MAX_WAITING_BLOCKS, PIECE_BLOCKS, BlockFeed

FRAME = 1 << 20


def pack(ids):
    return np.array(sorted(ids), "<u8").tobytes()


def unpack(data):
    return np.frombuffer(data, "<u8").tolist()


def change(stored=(), removed=(), rank=0, **fields):
    return KvChange(rank, pack(stored), pack(removed), **fields)


class Cache:
    """The blocks held by a worker, and its subscribers."""

    def __init__(self, num_ranks=1, **limits):
        self.held = [set() for _ in range(num_ranks)]
        self.feed = BlockFeed(self._held, max_frame_bytes=FRAME, **limits)

    def _held(self):
        return {rank: sorted(ids) for rank, ids in enumerate(self.held)}

    def change(self, stored=(), removed=(), rank=0, *, clear=False):
        held = self.held[rank]
        stored, removed = set(stored) - (set() if clear else held), (set(removed) & held) - set(stored)
        self.held[rank] = stored if clear else (held | stored) - removed
        self.feed.push(change(stored, () if clear else removed, rank, snapshot=clear))

    def pieces(self):
        found = []
        while (piece := self.feed.next()) is not None:
            found.append(piece)
        return found


class View:
    """What a gateway knows."""

    def __init__(self, num_blocks=0):
        self.inbox = BlockInbox(num_blocks=num_blocks)
        self.held = {}

    def receive(self, *pieces):
        """Whether everything is asked for again."""
        answers = [self.inbox.receive(piece) for piece in pieces]
        return not all(answers)

    def settle(self):
        while (piece := self.inbox.take()) is not None:
            known = set() if piece.snapshot else self.held.get(piece.rank, set())
            self.held[piece.rank] = (known - set(unpack(piece.removed))) | set(unpack(piece.stored))
        return self.held


def test_held_blocks_are_sent_first_per_rank_and_then_changes():
    cache, view = Cache(**SMALL), View()
    cache.change([1, 2], rank=0)
    first = cache.pieces()
    assert [(p.rank, p.snapshot, unpack(p.stored)) for p in first] == [(0, True, [1, 2]), (1, True, [])]
    cache.change([3], [1], rank=0)
    second = cache.pieces()
    assert [(p.rank, p.snapshot) for p in second] == [(0, False)]
    assert not view.receive(*first, *second)
    assert view.settle() == {0: {2, 3}, 1: set()}


def test_large_snapshot_is_chunked_and_changes_follow():
    cache, view = Cache(), View()
    cache.change(range(3 * PIECE_BLOCKS + 1))
    first = cache.feed.next()
    cache.change([10**6], range(5))
    rest = cache.pieces()
    assert [(p.snapshot, p.more) for p in [first, *rest]] == [(True, True), (False, True), (False, True)] + [
        (False, False)
    ] * 2
    assert max(len(p.stored) for p in [first, *rest]) == PIECE_BLOCKS * 8
    assert not view.receive(first, *rest)
    assert view.settle()[0] == cache.held[0]


def test_large_change_is_chunked():
    cache, view = Cache(), View()
    view.receive(*cache.pieces())
    cache.change(range(2 * PIECE_BLOCKS + 5))
    cache.change([10**7], range(PIECE_BLOCKS + 1))
    pieces = cache.pieces()
    assert [len(p.stored) // 8 for p in pieces] == [PIECE_BLOCKS, PIECE_BLOCKS, 5, 1, 0]
    assert not view.receive(*pieces)
    assert view.settle()[0] == cache.held[0]


def test_too_many_queued_changes_become_one_snapshot():
    cache, view = Cache(), View()
    view.receive(*cache.pieces())
    for start in range(0, 2 * MAX_WAITING_BLOCKS, 4096):
        cache.change(range(start, start + 4096), range(start - 4096, start))
    pieces = cache.pieces()
    assert [p.snapshot for p in pieces] == [True] + [False] * (len(pieces) - 1)
    assert len(pieces) <= -(-(MAX_WAITING_BLOCKS + 8192) // PIECE_BLOCKS)
    assert not view.receive(*pieces)
    assert view.settle()[0] == cache.held[0]


def test_feed_schedules_itself_once_per_new_data():
    cache = Cache()
    assert cache.feed.wants_to_send()
    assert not cache.feed.wants_to_send()
    buffer = bytearray()
    while cache.feed.append_next(buffer):
        pass
    assert not cache.feed.wants_to_send()
    cache.change([1])
    assert cache.feed.wants_to_send()
    cache.change([2])
    assert not cache.feed.wants_to_send()


def test_chunks_are_sent_as_messages():
    cache = Cache()
    cache.change([1, 2**64 - 1])
    buffer = bytearray()
    while cache.feed.append_next(buffer):
        pass
    message = decode_from_worker(memoryview(buffer)[HEADER.size :])
    assert isinstance(message, KvBlocks)
    assert unpack(message.change.stored) == [1, 2**64 - 1]


def test_changes_found_while_taking_a_snapshot_are_not_sent_twice():
    """The worker flushes queued changes before a snapshot, which already contains them."""
    notified = []

    def held():
        feed.push(change([5]))
        notified.append(True)
        return {0: [5]}

    feed = BlockFeed(held, max_frame_bytes=FRAME)
    assert unpack(feed.next().stored) == [5]
    assert feed.next() is None
    assert notified == [True]


def test_undrained_inbox_is_bounded_and_requests_a_snapshot_once():
    view = View(num_blocks=10)
    tracemalloc.start()
    asked = [view.receive(KvChange(number, bytes(1 << 20), b"", snapshot=True)) for number in range(10)]
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(asked) == view.inbox.num_overflows == 1
    assert held_bytes <= MAX_WAITING_BYTES + (1 << 20)
    view.settle()
    late = next(number for number in range(10) if number not in view.held)
    assert not view.receive(change([1], rank=late))
    assert late not in view.settle()
    assert not view.receive(change([2], rank=late, snapshot=True), change([3], rank=late))
    assert view.settle()[late] == {2, 3}


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("change"), st.sets(st.integers(0, 30), max_size=12), st.sets(st.integers(0, 30), max_size=12)
        ),
        st.tuples(st.just("clear"), st.sets(st.integers(0, 30), max_size=4), st.just(frozenset())),
        st.tuples(st.just("send"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("reconnect"), st.just(0), st.just(0)),
        st.tuples(st.just("settle"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


SMALL = {"num_ranks": 2, "piece_blocks": 3, "max_waiting_blocks": 12}


@settings(max_examples=300, deadline=None)
@given(EVENTS, st.integers(0, 1))
def test_gateway_state_converges_after_any_overflow_and_reconnection(events, rank):
    cache, view = Cache(**SMALL), View()

    def send():
        piece = cache.feed.next()
        if piece is not None and view.receive(piece):
            cache.feed.resync()
        return piece is not None

    for action, first, second in events:
        if action in ("change", "clear"):
            cache.change(first, second, rank, clear=action == "clear")
        elif action == "send":
            for _ in range(first):
                send()
        elif action == "reconnect":
            held = cache.held
            cache, view = Cache(**SMALL), View()
            cache.held = held
        else:
            view.settle()
    while send():
        pass
    assert {r: ids for r, ids in view.settle().items() if ids} == {r: ids for r, ids in enumerate(cache.held) if ids}
