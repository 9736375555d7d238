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
)
from medialane.core.media import MediaRef, MediaSize
from medialane.core.remote_entry import RemoteEntry
from medialane.core.tensor import ArenaRange, TensorDescriptor, TensorSpec
from medialane.gateway.handover import Handover
from medialane.observability.timeline import StageTimeline
from medialane.transfer import InlineTransport, PullTransport, ShmTransport, TransferPath

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

    def pass_on(self, ranges, *, to, request_id):
        self.ranges = ranges
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


async def test_embedding_is_granted_to_another_host_like_tensors(handover):
    found = await prompt(handover, "pull")
    assert [item.remote.range for item in found.features] == [tensor(4096).range, tensor(8192).range]


async def test_embedding_is_not_sent_in_a_message(handover):
    with pytest.raises(HandoverFailed):
        await prompt(handover, "inline")
