"""Embeddings in the payloads that a gateway sends."""

import pytest

from medialane.core.errors import HandoverFailed
from medialane.core.feature import (
    Embedding,
    Feature,
    MediaPrompt,
    PlacedFeature,
    PlaceholderRange,
    PreparedPrompt,
    StagedItem,
    WantedEmbedding,
)
from medialane.core.hashing import embedding_key
from medialane.core.media import MediaRef, MediaSize
from medialane.core.remote_entry import RemoteEntry
from medialane.core.request import EncoderCard
from medialane.core.tensor import ArenaRange, TensorDescriptor, TensorSpec
from medialane.gateway.handover import Handover
from medialane.gateway.transports import InlineTransport, PullTransport, ShmTransport, TransferPath
from medialane.observability.timeline import StageTimeline

PLACE = PlaceholderRange(1, 4, b"\1\1\0\1")


def tensor(offset):
    return TensorDescriptor(TensorSpec("bfloat16", (3, 8)), ArenaRange("a" * 32, offset, 64 + 64, 1), 64)


KNOWN = Feature("image", "known", b"header", (), MediaSize(), Embedding("k", tensor(4096)))
NEW = Feature("image", "new", b"header", (tensor(8192),), MediaSize())


class Media:
    async def in_stage(self, stage):
        return [StagedItem(MediaRef("image", "p", data=b"x"), feature, None) for feature in (KNOWN, NEW)]


class Passed:
    """Records the ranges that are passed, and those that are granted."""

    def pass_on(self, ranges, *, to, request_id, wanted=()):
        self.ranges, self.wanted = ranges, wanted
        return True

    async def grant(self, ranges):
        self.ranges = ranges
        return [RemoteEntry(found, "processed", "key", "tcp://h:1", 1, b"token") for found in ranges]


@pytest.fixture
def passed():
    return Passed()


@pytest.fixture
def handover(passed):
    transports = [ShmTransport(), PullTransport(), InlineTransport(lambda t: memoryview(bytes(t.spec.nbytes)))]
    return Handover(
        transports=transports, max_inline_bytes=1 << 20, holds=passed, grants=passed, encoder_ms_per_token=0.5
    )


async def prompt(handover, transport):
    features = tuple(PlacedFeature(feature, PLACE) for feature in (KNOWN, NEW))
    prepared = PreparedPrompt([1] * 8, features, ("known", "new"), MediaPrompt([1], ()), Media())
    return await handover.prompt(TransferPath("features", transport), [1] * 8, prepared, StageTimeline())


async def test_known_item_is_sent_by_its_embedding_and_another_with_the_time_of_encoding_it(handover, passed):
    found = await prompt(handover, "shm")
    known, new = found.features
    assert (known.tensors, known.embedding, known.embedding_wait_ms) == ((), KNOWN.embedding, 0.0)
    assert (new.tensors, new.embedding, new.embedding_wait_ms) == (NEW.tensors, None, 3 * 0.5)
    assert handover.pass_holds(found, to="w", request_id="r")
    assert passed.ranges == [tensor(4096).range, tensor(8192).range]
    assert passed.wanted == []


async def test_embeddings_of_new_items_are_passed_to_a_worker_that_keeps_them(handover, passed):
    found = await prompt(handover, "shm")
    encoder = EncoderCard("d" * 64, "bfloat16", {"image": 8})
    assert handover.pass_holds(found, to="w", request_id="r", encoder=encoder)
    described = Feature("image", "new", b"header", (), MediaSize())
    key = embedding_key(mm_hash="new", encoder=encoder.digest)
    assert passed.wanted == [WantedEmbedding(key, described, TensorSpec("bfloat16", (3, 8)))]
    assert handover.pass_holds(found, to="w", request_id="r", encoder=EncoderCard("d", "bfloat16", {"audio": 8}))
    assert passed.wanted == []


async def test_embedding_is_granted_to_another_host_like_tensors(handover):
    found = await prompt(handover, "pull")
    assert [item.remote.range for item in found.features] == [tensor(4096).range, tensor(8192).range]


async def test_embedding_is_not_sent_in_a_message(handover):
    with pytest.raises(HandoverFailed):
        await prompt(handover, "inline")


ENCODER = list(range(100, 110))


async def encoder_prompt(handover, path, *, processed):
    """The prompt that is sent for a decoder's tokens 1 to 3 and an encoder's prompt with two items."""
    features = tuple(PlacedFeature(feature, PLACE) for feature in (KNOWN, NEW)) if processed else ()
    encoder_token_ids = ENCODER if processed else [7]
    source = MediaPrompt([7], (), is_encoder_prompt=True)
    prepared = PreparedPrompt([7], features, ("known", "new"), source, Media(), encoder_token_ids)
    return await handover.prompt(path, [1, 2, 3], prepared, StageTimeline())


async def test_encoders_prompt_is_sent_besides_the_decoders(handover):
    found = await encoder_prompt(handover, TransferPath("features", "shm"), processed=True)
    assert (found.token_ids, found.encoder_token_ids, found.expanded_token_ids) == ([1, 2, 3], ENCODER, ENCODER)


@pytest.mark.parametrize("processed", [True, False], ids=["after a failed path", "at once"])
async def test_worker_that_processes_gets_the_encoders_unexpanded_prompt(handover, processed):
    found = await encoder_prompt(handover, TransferPath("decoded", "shm"), processed=processed)
    assert (found.token_ids, found.encoder_token_ids, found.stage) == ([1, 2, 3], [7], "decoded")
