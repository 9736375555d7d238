import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from simulated_encoders import EmbeddingStore


def test_one_client_computes_a_new_item_and_others_wait():
    store, told = EmbeddingStore(), []
    assert store.begin("a", "w0")
    assert not store.begin("a", "w1")
    assert store.writer("a") == "w0"
    store.wait("a", told.append)
    assert "a" not in store
    store.end("a", is_computed=True)
    assert told == [True]
    assert "a" in store
    assert store.writer("a") is None
    assert not store.begin("a", "w1"), "known items are not computed again"


def test_item_whose_writer_failed_is_new_again():
    store, told = EmbeddingStore(), []
    store.begin("a", "w0")
    store.wait("a", told.append)
    store.end("a", is_computed=False)
    assert told == [False]
    assert store.begin("a", "w1")


def test_waiter_may_begin_the_item_that_its_writer_gave_up():
    store = EmbeddingStore()
    store.begin("a", "w0")
    store.wait("a", lambda _is_computed: store.begin("a", "w1"))
    store.end("a", is_computed=False)
    assert store.writer("a") == "w1"


def test_only_flights_can_be_waited_for_and_ended():
    with pytest.raises(KeyError):
        EmbeddingStore().wait("a", print)
    with pytest.raises(KeyError):
        EmbeddingStore().end("a", is_computed=True)
