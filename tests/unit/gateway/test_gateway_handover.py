"""Embeddings in the payloads that a gateway sends."""

from typing import NamedTuple

import pytest

from medialane.gateway import HandoverPath, PullTransport, ShmTransport
from medialane.gateway.request.handover_paths import prompt_for
from medialane.observability import RequestTimeline
from medialane.types.feature import (
    Embedding,
    Feature,
    MediaPrompt,
    PlacedFeature,
    PlaceholderRange,
    PreparedPrompt,
    RemoteEntry,
    StagedItem,
    WantedEmbedding,
)
from medialane.types.hashing import embedding_key
from medialane.types.media import STAGES, MediaRef, MediaSize
from medialane.types.request import EncoderCard
from medialane.types.tensor import ArenaRange, TensorDescriptor, TensorSpec

PLACE = PlaceholderRange(1, 4, b"\1\1\0\1")


def tensor(offset):
    return TensorDescriptor(TensorSpec("bfloat16", (3, 8)), ArenaRange("a" * 32, offset, 64 + 64, 1), 64)


KNOWN = Feature("image", "known", b"header", (), MediaSize(), Embedding("k", tensor(4096)))
NEW = Feature("image", "new", b"header", (tensor(8192),), MediaSize())


class Media:
    async def in_stage(self, stage):
        return [StagedItem(MediaRef("image", "p", data=b"x"), feature, None) for feature in (KNOWN, NEW)]


class Passed:
    """Records the ranges that are passed, and the ranges that are granted."""

    def pass_on(self, ranges, *, to, request_id, wanted=()):
        self.ranges, self.wanted = ranges, wanted
        return True

    async def grant(self, ranges):
        self.ranges = ranges
        return [RemoteEntry(found, "processed", "key", "tcp://h:1", 1, b"token") for found in ranges]


class Worker(NamedTuple):
    store_client: str = "w"
    encoder_card: EncoderCard | None = None


@pytest.fixture
def passed():
    return Passed()


async def prompt(transport, encoder_ms_per_token=0.5):
    features = tuple(PlacedFeature(feature, PLACE) for feature in (KNOWN, NEW))
    prepared = PreparedPrompt([1] * 8, features, ("known", "new"), MediaPrompt([1], ()), Media())
    path = HandoverPath(STAGES["features"], transport)
    return await prompt_for(path, [1] * 8, prepared, RequestTimeline(), encoder_ms_per_token=encoder_ms_per_token)


async def test_known_item_is_sent_by_its_embedding_and_another_with_the_time_of_encoding_it(passed):
    shm = ShmTransport(passed)
    sent = await prompt(shm)
    known, new = sent.features
    assert (known.tensors, known.embedding, known.embedding_wait_ms) == ((), KNOWN.embedding, 0.0)
    assert (new.tensors, new.embedding, new.embedding_wait_ms) == (NEW.tensors, None, 3 * 0.5)
    assert shm.pass_holds(sent, Worker(), "r")
    assert passed.ranges == [tensor(4096).range, tensor(8192).range]
    assert passed.wanted == []


async def test_embeddings_of_new_items_are_passed_to_a_worker_that_keeps_them(passed):
    shm = ShmTransport(passed)
    sent = await prompt(shm)
    encoder = EncoderCard("d" * 64, "bfloat16", {"image": 8})
    assert shm.pass_holds(sent, Worker(encoder_card=encoder), "r")
    described = Feature("image", "new", b"header", (), MediaSize())
    key = embedding_key(mm_hash="new", encoder=encoder.digest)
    assert passed.wanted == [WantedEmbedding(key, described, TensorSpec("bfloat16", (3, 8)))]
    assert shm.pass_holds(sent, Worker(encoder_card=EncoderCard("d", "bfloat16", {"audio": 8})), "r")
    assert passed.wanted == []


async def test_embedding_is_granted_to_another_host_like_tensors(passed):
    sent = await prompt(PullTransport(passed))
    assert [item.remote.range for item in sent.features] == [tensor(4096).range, tensor(8192).range]


ENCODER = list(range(100, 110))


async def encoder_prompt(stage, *, processed):
    """The prompt that is sent for a decoder's tokens 1 to 3 and an encoder's prompt with two items."""
    features = tuple(PlacedFeature(feature, PLACE) for feature in (KNOWN, NEW)) if processed else ()
    encoder_token_ids = ENCODER if processed else [7]
    source = MediaPrompt([7], (), is_encoder_prompt=True)
    prepared = PreparedPrompt([7], features, ("known", "new"), source, Media(), encoder_token_ids)
    path = HandoverPath(STAGES[stage], ShmTransport(None))
    return await prompt_for(path, [1, 2, 3], prepared, RequestTimeline())


async def test_encoders_prompt_is_sent_besides_the_decoders():
    sent = await encoder_prompt("features", processed=True)
    assert (sent.token_ids, sent.encoder_token_ids, sent.expanded_token_ids) == ([1, 2, 3], ENCODER, ENCODER)


@pytest.mark.parametrize("processed", [True, False], ids=["after a failed path", "at once"])
async def test_worker_that_processes_gets_the_encoders_unexpanded_prompt(processed):
    sent = await encoder_prompt("decoded", processed=processed)
    assert (sent.token_ids, sent.encoder_token_ids, sent.stage) == ([1, 2, 3], [7], "decoded")
