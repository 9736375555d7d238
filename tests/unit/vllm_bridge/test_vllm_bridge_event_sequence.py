from hypothesis import given
from hypothesis import strategies as st

from medialane.vllm_bridge.engine.event_sequence import EventSequence, Verdict


def test_batches_in_order_are_accepted():
    sequence = EventSequence()
    assert [sequence.live(n) for n in range(3)] == [Verdict.TAKE] * 3


def test_missing_batches_are_detected_and_filled():
    sequence = EventSequence()
    sequence.live(0)
    assert sequence.live(3) is Verdict.GAP
    assert [sequence.buffered(n) for n in (0, 1, 2, 3)] == [Verdict.SEEN, *[Verdict.TAKE] * 3]
    assert sequence.live(4) is Verdict.TAKE


def test_replayed_batches_are_not_applied_twice():
    sequence = EventSequence()
    for n in range(3):
        sequence.buffered(n)
    assert [sequence.live(n) for n in range(4)] == [*[Verdict.SEEN] * 3, Verdict.TAKE]


def test_restarted_sequence_numbers_are_detected():
    sequence = EventSequence()
    for n in range(3):
        sequence.live(n)
    assert sequence.live(0) is Verdict.RESTARTED
    assert sequence.live(0) is Verdict.TAKE


def test_lost_batches_can_be_skipped():
    sequence = EventSequence()
    assert sequence.live(5) is Verdict.GAP
    sequence.skip_to(5)
    assert sequence.buffered(5) is Verdict.TAKE


@given(st.sets(st.integers(0, 40)), st.integers(1, 50))
def test_every_batch_is_applied_once_in_order_despite_losses(lost, count):
    sequence, taken = EventSequence(), []
    for n in range(count):
        if n in lost:
            continue
        verdict = sequence.live(n)
        if verdict is Verdict.GAP:
            taken += [m for m in range(n + 1) if sequence.buffered(m) is Verdict.TAKE]
        elif verdict is Verdict.TAKE:
            taken.append(n)
    assert taken == list(range(len(taken)))
    assert len(taken) == max((n + 1 for n in range(count) if n not in lost), default=0)
