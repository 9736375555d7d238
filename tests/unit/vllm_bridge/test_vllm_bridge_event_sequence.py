from hypothesis import given
from hypothesis import strategies as st

from medialane.vllm_bridge.engine.event_sequence import BatchStatus, EventSequence


def test_batches_in_order_are_accepted():
    sequence = EventSequence()
    assert [sequence.live(n) for n in range(3)] == [BatchStatus.TAKE] * 3


def test_missing_batches_are_detected_and_filled():
    sequence = EventSequence()
    sequence.live(0)
    assert sequence.live(3) is BatchStatus.GAP
    assert [sequence.buffered(n) for n in (0, 1, 2, 3)] == [BatchStatus.SEEN, *[BatchStatus.TAKE] * 3]
    assert sequence.live(4) is BatchStatus.TAKE


def test_replayed_batches_are_not_applied_twice():
    sequence = EventSequence()
    for n in range(3):
        sequence.buffered(n)
    assert [sequence.live(n) for n in range(4)] == [*[BatchStatus.SEEN] * 3, BatchStatus.TAKE]


def test_restarted_sequence_numbers_are_detected():
    sequence = EventSequence()
    for n in range(3):
        sequence.live(n)
    assert sequence.live(0) is BatchStatus.RESTARTED
    assert sequence.live(0) is BatchStatus.TAKE


def test_lost_batches_can_be_skipped():
    sequence = EventSequence()
    assert sequence.live(5) is BatchStatus.GAP
    sequence.skip_to(5)
    assert sequence.buffered(5) is BatchStatus.TAKE


@given(st.sets(st.integers(0, 40)), st.integers(1, 50))
def test_every_batch_is_applied_once_in_order_despite_losses(lost, count):
    sequence, taken = EventSequence(), []
    for n in range(count):
        if n in lost:
            continue
        status = sequence.live(n)
        if status is BatchStatus.GAP:
            taken += [m for m in range(n + 1) if sequence.buffered(m) is BatchStatus.TAKE]
        elif status is BatchStatus.TAKE:
            taken.append(n)
    assert taken == list(range(len(taken)))
    assert len(taken) == max((n + 1 for n in range(count) if n not in lost), default=0)
