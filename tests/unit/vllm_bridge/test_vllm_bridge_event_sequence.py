from hypothesis import given
from hypothesis import strategies as st

from medialane.vllm_bridge.event_sequence import EventSequence, Verdict


def test_batches_in_order_are_taken():
    sequence = EventSequence()
    assert [sequence.live(n) for n in range(3)] == [Verdict.TAKE] * 3


def test_missing_batches_are_noticed_and_filled():
    sequence = EventSequence()
    sequence.live(0)
    assert sequence.live(3) is Verdict.GAP
    assert [sequence.buffered(n) for n in (0, 1, 2, 3)] == [Verdict.SEEN, *[Verdict.TAKE] * 3]
    assert sequence.live(4) is Verdict.TAKE


def test_what_the_buffer_told_is_not_taken_again():
    sequence = EventSequence()
    for n in range(3):
        sequence.buffered(n)
    assert [sequence.live(n) for n in range(4)] == [*[Verdict.SEEN] * 3, Verdict.TAKE]


def test_publisher_that_counts_again_is_noticed():
    sequence = EventSequence()
    for n in range(3):
        sequence.live(n)
    assert sequence.live(0) is Verdict.RESTARTED
    assert sequence.live(0) is Verdict.TAKE


def test_what_is_lost_can_be_skipped():
    sequence = EventSequence()
    assert sequence.live(5) is Verdict.GAP
    sequence.skip_to(5)
    assert sequence.buffered(5) is Verdict.TAKE


@given(st.sets(st.integers(0, 40)), st.integers(1, 50))
def test_every_batch_is_taken_once_and_in_order_whatever_is_lost_on_the_way(lost, count):
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
