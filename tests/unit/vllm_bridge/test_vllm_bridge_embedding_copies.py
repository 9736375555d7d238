"""Copies between an arena and vLLM's encoder cache."""

import logging
import tempfile

import pytest
import torch

from builders import checked_arena
from medialane.arena import describe, layout
from medialane.types.tensor import TensorSpec
from medialane.vllm_bridge.engine.embedding_connector import CopyCounts, EmbeddingCopies, StepEmbeddings

SPEC = TensorSpec("bfloat16", (30, 64))
OUTPUT = torch.arange(30 * 64, dtype=torch.float32).view(30, 64).to(torch.bfloat16)


class World:
    def __init__(self, arena, directory, *, saves=True):
        self.arena = arena
        self.copies = EmbeddingCopies(arena.view.tensor, directory, saves=saves)
        self.reservations = []

    def reserved(self, spec=SPEC):
        reservation = self.arena.reserve(layout([spec])[1], "embedded")
        self.reservations.append(reservation)
        return reservation, *describe(reservation.range, [spec])

    def step(self, cache, **kinds):
        step = StepEmbeddings(**kinds)
        self.copies.begin(step)
        self.copies.load(step, cache)
        self.copies.save(cache)
        return self.copies.take_copied()


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="medialane-test-", dir="/dev/shm") as folder:
        yield folder


@pytest.fixture
def arena(directory):
    with checked_arena(directory=directory) as arena:
        yield arena


@pytest.fixture
def world(arena, directory):
    made = World(arena, directory)
    yield made
    for reservation in made.reservations:
        reservation.abandon()


def test_output_that_is_saved_is_loaded_bit_for_bit(world):
    reservation, tensor = world.reserved()
    strided = torch.cat([OUTPUT, OUTPUT], dim=1)[:, :64]
    assert world.step({"a": strided}, fills={"r": {"a": tensor}}) == CopyCounts(1, 0, [])
    assert world.arena.is_completed(reservation)
    cache = {}
    assert world.step(cache, loads={"a": tensor}) is None
    assert torch.equal(cache["a"], OUTPUT)
    reservation.buffer[:] = bytes(len(reservation.buffer))
    assert torch.equal(cache["a"], OUTPUT), "a copy: the encoder cache outlives the request"


def test_output_is_saved_when_it_is_there_and_once(world):
    _, tensor = world.reserved()
    assert world.step({}, fills={"r": {"a": tensor}}) is None
    assert world.step({"a": OUTPUT}) == CopyCounts(1, 0, [])
    assert world.step({"a": OUTPUT}) is None


def test_output_of_a_request_that_has_ended_is_not_saved(world):
    reservation, tensor = world.reserved()
    world.step({}, fills={"r": {"a": tensor}})
    assert world.step({"a": OUTPUT}, ended=["r"]) is None
    assert not world.arena.is_completed(reservation)


def test_only_one_rank_saves(arena, world, directory):
    reservation, tensor = world.reserved()
    other = World(arena, directory, saves=False)
    assert other.step({"a": OUTPUT}, fills={"r": {"a": tensor}}) is None
    assert not arena.is_completed(reservation)


@pytest.mark.parametrize("output", [OUTPUT.float(), OUTPUT[:-1], OUTPUT[:, :32], OUTPUT.to(torch.complex64)], ids=str)
def test_output_of_another_kind_is_never_written_and_logged_once(world, caplog, output):
    reservation, tensor = world.reserved()
    with caplog.at_level(logging.ERROR):
        for name in "rs":
            assert world.step({"a": output}, fills={name: {"a": tensor}}) == CopyCounts(0, 1, [])
    assert len(caplog.records) == 1
    assert not world.arena.is_completed(reservation)
    assert bytes(reservation.buffer).count(0) == len(reservation.buffer)


def test_range_that_is_gone_is_not_written(world, caplog):
    """Its request has released it at its first token, before another one has the item encoded."""
    reservation, tensor = world.reserved()
    world.arena.revoke(reservation)
    with world.arena.reserve(SPEC.nbytes) as other:
        assert other.range.offset == reservation.range.offset
        other.buffer[:] = b"o" * len(other.buffer)
        assert world.step({"a": OUTPUT}, fills={"r": {"a": tensor}}) is None
        assert bytes(other.buffer) == b"o" * len(other.buffer)
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_range_that_two_requests_have_is_written_once(world):
    _, tensor = world.reserved()
    assert world.step({"a": OUTPUT}, fills={"r": {"a": tensor}, "s": {"a": tensor}}) == CopyCounts(1, 0, [])


def test_item_that_cannot_be_loaded_is_reported_and_leaves_the_engine_alive(world):
    reservation, tensor = world.reserved()
    world.arena.revoke(reservation)
    cache = {}
    assert world.step(cache, loads={"a": tensor}) == CopyCounts(0, 1, ["a"])
    assert (cache["a"].shape, cache["a"].dtype) == (OUTPUT.shape, OUTPUT.dtype)


def test_item_that_is_in_the_cache_is_not_loaded(world):
    _, tensor = world.reserved()
    cache = {"a": OUTPUT}
    assert world.step(cache, loads={"a": tensor}) is None
    assert cache["a"] is OUTPUT
