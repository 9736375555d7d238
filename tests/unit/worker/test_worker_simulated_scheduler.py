import pytest

from medialane.testing.simulated.scheduler import EncoderCache, Scheduler
from medialane.testing.simulated.sequence import BlockPool, SimulatedItem, SimulatedSequence, answer_of
from medialane.types.feature import PlaceholderRange
from medialane.types.kv_blocks import BlockStored


def scheduler(*, blocks=100, embeds=100, max_num_seqs=8, budget=32, max_encoder_tokens=None):
    return Scheduler(
        BlockPool(blocks),
        EncoderCache(embeds),
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_encoder_tokens=max_encoder_tokens or embeds,
    )


def sequence(name, tokens, *, max_tokens=3, items=()):
    return SimulatedSequence(name, tokens, block_size=4, max_tokens=max_tokens, items=items)


def image(name, offset, length, *, is_embedded=False):
    return SimulatedItem(name, PlaceholderRange(offset, length), is_embedded=is_embedded)


def run(found, limit=200):
    """Step until nothing is left; the tokens that each step computed, by request."""
    steps = []
    for _ in range(limit):
        step = found.step()
        if not step.tokens:
            return steps
        steps.append({s.request_id: n for s, n in step.tokens.items()})
        found.complete(step)
    raise AssertionError("it does not end")


def test_prefill_is_chunked_and_decode_is_token_by_token():
    found, one = scheduler(budget=10), sequence("a", range(25))
    found.add(one)
    assert run(found) == [{"a": 10}, {"a": 10}, {"a": 5}, {"a": 1}, {"a": 1}]
    assert one.answer == answer_of(range(25), 3)
    assert one.finished
    assert found.pool.usage == 0.0


def test_running_requests_are_scheduled_first_and_share_the_budget():
    found = scheduler(budget=10)
    found.add(sequence("a", range(6)))
    found.add(sequence("b", range(100, 120)))
    assert run(found)[:3] == [{"a": 6, "b": 4}, {"a": 1, "b": 9}, {"a": 1, "b": 7}]


def test_running_requests_are_limited():
    found = scheduler(max_num_seqs=1)
    found.add(sequence("a", range(6), max_tokens=1))
    found.add(sequence("b", range(6), max_tokens=1))
    assert run(found) == [{"a": 6}, {"b": 2}]


def test_repeated_prompt_reuses_full_blocks_except_its_last_token():
    found = scheduler()
    for name in "ab":
        one = sequence(name, range(12))
        found.add(one)
        steps = run(found)
    assert steps[0] == {"b": 4}
    assert one.num_cached_tokens == 8


def test_longer_prompt_reuses_the_previous_output():
    found, first = scheduler(), sequence("a", range(10), max_tokens=7)
    found.add(first)
    run(found)
    second = sequence("b", [*first.token_ids, 7, 8, 9])
    found.add(second)
    run(found)
    assert second.num_cached_tokens == 16, "the last token of an answer is never computed"


def test_equal_prompts_of_one_step_share_blocks():
    found = scheduler()
    found.add(sequence("a", range(12)))
    found.add(sequence("b", range(12)))
    assert run(found)[0] == {"a": 12, "b": 4}


def test_request_waits_until_its_whole_prompt_fits():
    found = scheduler(blocks=6, budget=8)
    found.add(sequence("a", range(12), max_tokens=1))
    found.add(sequence("b", range(100, 112), max_tokens=1))
    assert run(found) == [{"a": 8}, {"a": 4}, {"b": 8}, {"b": 4}]


def test_last_request_is_preempted_when_blocks_run_out_and_completes_later():
    found = scheduler(blocks=7)
    first, last = sequence("a", range(11), max_tokens=6), sequence("b", range(100, 111), max_tokens=6)
    found.add(first)
    found.add(last)
    run(found)
    assert first.finished
    assert last.finished
    assert (first.num_preemptions, last.num_preemptions) == (0, 1)
    assert last.num_cached_tokens == 0, "what it finds of itself is no hit"


def test_events_report_stored_and_evicted_blocks():
    found = scheduler(blocks=4)
    found.add(sequence("a", range(12), max_tokens=1))
    run(found)
    [event] = found.take_events()
    assert isinstance(event, BlockStored)
    found.add(sequence("b", range(50, 59), max_tokens=1))
    run(found)
    *removed, stored = found.take_events()
    assert [h for e in removed for h in e.block_hashes] == list(reversed(event.block_hashes))
    assert stored.token_ids == list(range(50, 58))


def test_image_is_encoded_once_for_requests_that_share_it():
    found = scheduler()
    for name, start in (("a", 0), ("b", 100)):
        found.add(sequence(name, range(start, start + 12), items=[image("i", 2, 8)]))
    step = found.step()
    assert step.num_embeds == 8
    found.complete(step)
    run(found)
    found.add(sequence("c", range(200, 212), items=[image("i", 2, 8)]))
    assert found.step().num_embeds == 0


def test_loaded_image_is_not_encoded_and_stays_in_the_encoder_cache():
    found = scheduler()
    found.add(sequence("a", range(12), items=[image("i", 2, 8, is_embedded=True)]))
    step = found.step()
    assert (step.num_embeds, step.num_loaded_embeds) == (0, 8)
    found.complete(step)
    run(found)
    found.add(sequence("b", range(100, 112), items=[image("i", 2, 8, is_embedded=True)]))
    step = found.step()
    assert (step.num_embeds, step.num_loaded_embeds) == (0, 0)


def test_loaded_images_need_space_in_the_encoder_cache_but_no_budget():
    loaded = [image("i", 0, 60, is_embedded=True), image("j", 60, 40)]
    for budget, num_tokens in ((40, 101), (39, 60)):
        found = scheduler(budget=200, max_encoder_tokens=budget)
        found.add(sequence("a", range(101), items=loaded))
        assert sum(found.step().tokens.values()) == num_tokens
    found = scheduler(budget=200, embeds=99)
    found.add(sequence("a", range(101), items=loaded))
    assert sum(found.step().tokens.values()) == 60


def test_image_in_the_cached_prefix_is_not_encoded_again():
    found = scheduler(embeds=10)
    found.add(sequence("a", range(13), items=[image("i", 2, 8)]))
    run(found)
    found.add(sequence("b", range(100, 113), items=[image("j", 2, 8)]))
    run(found)
    found.add(sequence("c", range(13), items=[image("i", 2, 8)]))
    assert found.step().num_embeds == 0


def test_chunk_ends_before_an_image_that_does_not_fit():
    found = scheduler(embeds=8)
    found.add(sequence("a", range(20), items=[image("i", 2, 8), image("j", 11, 8)]))
    assert run(found)[:2] == [{"a": 11}, {"a": 9}]


def test_image_occurring_twice_is_encoded_once():
    found = scheduler(embeds=8)
    found.add(sequence("a", range(20), items=[image("i", 1, 8), image("i", 11, 8)]))
    step = found.step()
    assert (step.num_embeds, *step.tokens.values()) == (8, 20)
    found.complete(step)
    run(found)
    assert found.encoder_cache.make_room(8)


def test_removed_request_leaves_its_blocks_and_images_cached():
    found, one = scheduler(embeds=8), sequence("a", range(20), items=[image("i", 1, 8)])
    found.add(one)
    step = found.step()
    found.remove(one)
    assert found.complete(step) == []
    assert found.pool.usage == 0.0
    assert found.encoder_cache.make_room(8)
    waiting = sequence("b", range(20))
    found.add(waiting)
    found.remove(waiting)
    found.remove(waiting)
    assert run(found) == []


@pytest.mark.parametrize("budget", [7, 16, 64])
def test_work_per_step_is_counted(budget):
    found = scheduler(budget=budget)
    found.add(sequence("a", range(40), max_tokens=5, items=[image("i", 4, 9)]))
    steps = []
    while (step := found.step()).tokens:
        steps.append(step)
        found.complete(step)
    assert sum(s.num_prefill_tokens for s in steps) == 40
    assert sum(s.num_decode_tokens for s in steps) == 4
    assert sum(s.num_embeds for s in steps) == 9
    assert abs(sum(s.num_prefill_pairs for s in steps) - 40 * 40 // 2) < len(steps)
