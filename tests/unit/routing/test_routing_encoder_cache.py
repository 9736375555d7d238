"""The mirror of the engines' encoder caches, alone and against vLLM's own bookkeeping."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_parts import EncoderCacheModel, EncoderCaches


@pytest.fixture
def dropped():
    return []


@pytest.fixture
def model(dropped):
    return EncoderCacheModel(100, dropped.append)


def encode(model, name, num_embeds):
    model.pin(name, num_embeds)
    model.unpin(name, computed=True)


def test_item_counts_as_held_from_when_it_is_sent(model):
    assert model.pin("a", 40)
    assert "a" in model
    assert model.num_embeds == 40


def test_least_recently_unpinned_item_is_evicted(model, dropped):
    for name in "ab":
        encode(model, name, 50)
    model.pin("a", 50)
    model.unpin("a", computed=True)  # used again, so b is the oldest now
    encode(model, "c", 50)
    assert dropped == ["b"]
    assert "a" in model
    assert "c" in model


def test_pinned_item_is_never_evicted(model, dropped):
    model.pin("a", 60)
    model.pin("b", 60)
    assert dropped == []
    model.unpin("a", computed=True)
    assert dropped == ["a"]


def test_item_of_an_aborted_request_is_no_longer_held(model, dropped):
    model.pin("a", 10)
    model.unpin("a", computed=False)
    assert dropped == ["a"]


def test_item_aborted_by_one_request_stays_for_the_other(model, dropped):
    model.pin("a", 10)
    model.pin("a", 10)
    model.unpin("a", computed=False)
    assert dropped == []
    model.unpin("a", computed=True)
    assert "a" in model


def test_encoded_item_survives_a_later_abort(model, dropped):
    encode(model, "a", 10)
    model.pin("a", 10)
    model.unpin("a", computed=False)
    assert dropped == []


def test_item_larger_than_the_cache_is_not_held(model):
    assert not model.pin("a", 101)
    assert "a" not in model
    assert model.num_embeds == 0


def test_unpinning_an_absent_item_is_a_no_op(model):
    model.unpin("a", computed=True)
    encode(model, "a", 1)
    model.unpin("a", computed=False)
    assert "a" in model


def test_clear_drops_everything(model, dropped):
    encode(model, "a", 10)
    model.pin("b", 10)
    model.clear()
    assert sorted(dropped) == ["a", "b"]
    assert model.num_embeds == 0


names = st.sampled_from("abcdefgh")
SIZES = {name: 7 + 5 * number for number, name in enumerate("abcdefgh")}


@given(st.lists(names, max_size=60))
def test_sequential_requests_leave_what_vllm_would_hold(sent):
    """vLLM: evict the oldest unreferenced until the new one fits; a hit becomes referenced, then the newest."""
    model = EncoderCacheModel(80, lambda name: None)
    theirs: OrderedDict[str, int] = OrderedDict()
    for name in sent:
        assert (name in model) == (name in theirs)
        encode(model, name, SIZES[name])
        theirs.pop(name, None)
        while sum(theirs.values()) + SIZES[name] > 80:
            theirs.popitem(last=False)
        theirs[name] = SIZES[name]
        assert model.num_embeds == sum(theirs.values())


@given(st.lists(st.tuples(names, st.booleans()), max_size=80))
def test_holders_are_the_slots_whose_cache_model_has_the_item(steps):
    caches, pinned = EncoderCaches(), []
    models = [EncoderCacheModel(60, lambda name: None) for _ in range(3)]
    for slot in range(3):
        caches.join(slot, 60)
    for number, (name, computed) in enumerate(steps):
        slot = number % 3
        pinned.append((slot, caches.pin(slot, [(name, SIZES[name])]), computed))
        models[slot].pin(name, SIZES[name])
        if len(pinned) > 4:
            slot, names_, computed = pinned.pop(0)
            caches.unpin(slot, names_, computed=computed)
            for name_ in names_:
                models[slot].unpin(name_, computed=computed)
        for name_ in SIZES:
            held = sum(1 << slot for slot, model in enumerate(models) if name_ in model)
            assert caches.holders(name_) == held
    for slot in range(3):
        caches.leave(slot)
    assert caches.num_items == 0


def test_cache_of_unknown_size_holds_nothing():
    caches = EncoderCaches()
    caches.join(0, 0)
    assert caches.pin(0, [("a", 5)]) == []
    assert caches.holders("a") == 0


def test_unpinning_in_a_removed_slot_is_a_no_op():
    caches = EncoderCaches()
    caches.join(2, 50)
    pinned = caches.pin(2, [("a", 5)])
    caches.leave(2)
    caches.unpin(2, pinned, computed=True)
    assert caches.holders("a") == 0
