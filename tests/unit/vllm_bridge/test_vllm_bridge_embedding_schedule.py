"""The scheduler's side of the embedding connector, without vLLM."""

import msgspec
import pytest

from medialane.types.request import EmbeddingCounts
from medialane.types.tensor import ArenaRange, TensorDescriptor, TensorSpec
from medialane.vllm_bridge.engine.embedding_connector import EmbeddingPlan, EmbeddingSchedule, StepEmbeddings


def tensor(number):
    return TensorDescriptor(TensorSpec("float32", (4, 8)), ArenaRange("a" * 32, 4096 * number, 256, number), 64)


def sent(name, *, loads=(), fills=(), absent=()):
    return msgspec.msgpack.encode(EmbeddingPlan(name, dict(loads), dict(fills), list(absent)))


class World:
    def __init__(self):
        self.freed = []
        self.refused = []
        self.schedule = EmbeddingSchedule(lambda found: found not in self.freed, self.refused.append)

    def consider(self, name, data=None, *, items=("a",), computed=0):
        """The scheduler considers a request with items of ten tokens each."""
        ends = {item: 10 * (number + 1) for number, item in enumerate(items)}
        return self.schedule.is_available(f"{name}-1", data, ends=lambda: ends, num_computed_tokens=computed)

    def step(self, *freed, runs_model=True):
        return self.schedule.take_step(freed=freed, runs_model=runs_model)


@pytest.fixture
def world():
    return World()


def test_item_with_an_embedding_is_loaded_as_long_as_its_request_exists(world):
    assert not world.schedule.has("a")
    assert world.consider("r", sent("r", loads={"a": tensor(1)}))
    assert world.schedule.has("a")
    for _ in range(2):  # the second time after a preemption
        world.schedule.allocated("a")
        assert world.step() == StepEmbeddings(loads={"a": tensor(1)})
        assert world.step() == StepEmbeddings()
    world.schedule.end("r-1")
    assert not world.schedule.has("a")
    world.schedule.allocated("a")
    assert world.step() == StepEmbeddings()
    assert world.schedule.counts == EmbeddingCounts(loaded=2, encoded=1)


def test_item_of_two_requests_is_loaded_until_both_have_ended(world):
    for number, name in enumerate("rs", 1):
        assert world.consider(name, sent(name, loads={"a": tensor(number)}))
    world.schedule.end("r-1")
    world.schedule.end("r-1")
    world.schedule.allocated("a")
    assert world.step().loads == {"a": tensor(2)}
    world.schedule.end("s-1")
    assert not world.schedule.has("a")


def test_embedding_that_can_be_read_is_preferred(world):
    for number, name in enumerate("rs", 1):
        assert world.consider(name, sent(name, loads={"a": tensor(number)}))
    world.freed.append(tensor(1))
    world.schedule.allocated("a")
    assert world.step().loads == {"a": tensor(2)}


def test_request_whose_embedding_is_gone_fails_before_it_is_scheduled(world):
    data = sent("r", loads={"a": tensor(1)})
    assert world.consider("r", data)
    world.freed.append(tensor(1))
    assert not world.consider("r", data)
    assert not world.consider("r", data)
    assert not world.schedule.has("a")
    assert (world.schedule.take_refused(), world.schedule.take_refused()) == ({"r-1"}, set())
    assert world.refused == ["r"]
    assert world.schedule.counts.failed == 1
    assert world.consider("s")


def test_request_that_is_past_its_items_is_not_checked(world):
    data = sent("r", loads={"a": tensor(1), "b": tensor(2)})
    assert world.consider("r", data, items=("a", "b"))
    world.freed += [tensor(1), tensor(2)]
    assert world.consider("r", data, items=("a", "b"), computed=20)
    assert not world.consider("r", data, items=("a", "b"), computed=19)


def test_request_without_media_is_scheduled_as_long_as_all_of_them_are_computed(world):
    data = sent("r", absent=["a", "b"])
    assert world.consider("r", data, items=("a", "b"), computed=20)
    assert not world.schedule.has("a")
    assert not world.consider("r", data, items=("a", "b"), computed=19)
    assert (world.schedule.take_refused(), world.refused) == ({"r-1"}, ["r"])


def test_request_without_media_whose_blocks_are_not_there_fails_at_once(world):
    assert not world.consider("r", sent("r", absent=["a"]))
    assert world.schedule.take_refused() == {"r-1"}


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode(["r"]), msgspec.msgpack.encode(7)], ids=repr)
def test_embeddings_that_cannot_be_decoded_fail_their_request(world, data):
    assert not world.consider("r", data)
    assert world.schedule.take_refused() == {"r-1"}


def test_fill_is_sent_once_with_a_step_that_runs_the_model(world):
    assert world.consider("r", sent("r", fills={"a": tensor(1)}))
    assert not world.schedule.has("a")
    assert world.step(runs_model=False) == StepEmbeddings()
    assert world.step() == StepEmbeddings(fills={"r-1": {"a": tensor(1)}})
    assert world.consider("r", sent("r", fills={"a": tensor(1)}))
    assert world.step() == StepEmbeddings()
    world.schedule.end("r-1")
    assert world.step() == StepEmbeddings(ended=["r-1"])


def test_fill_of_a_request_that_has_ended_is_not_sent(world):
    assert world.consider("r", sent("r", fills={"a": tensor(1)}))
    world.schedule.end("r-1")
    assert world.step().fills == {}


def test_dropped_fills_are_neither_sent_nor_written(world):
    for number, name in enumerate("rs", 1):
        assert world.consider(name, sent(name, loads={"b": tensor(3)}, fills={"a": tensor(number)}))
        if name == "r":
            world.step()
    world.schedule.drop_fills()
    assert world.step() == StepEmbeddings(ended=["r-1", "s-1"])
    assert world.schedule.has("b")
    for name in "rs":
        world.schedule.end(f"{name}-1")
    assert world.step() == StepEmbeddings()


def test_item_that_could_not_be_loaded_fails_requests_until_it_is_evicted(world):
    world.schedule.report(num_saved=2, num_failed=1, unusable=["a"])
    assert not world.consider("r")
    assert world.consider("s", items=("b",))
    world.step("b")
    assert not world.consider("t")
    world.step("a")
    assert world.consider("u")
    assert world.schedule.take_refused() == {"r-1", "t-1"}
    assert world.schedule.counts == EmbeddingCounts(saved=2, failed=3)
