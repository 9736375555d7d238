"""What a worker finds of the embeddings of one request, and what it holds meanwhile."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from medialane.types.errors import ArenaFull, HandoverFailed, StoreUnavailable
from medialane.types.feature import (
    MAX_HEADER_BYTES,
    Embedding,
    EmbeddingUse,
    FoundEmbedding,
    LocalCopy,
    MediaPayload,
    PlaceholderRange,
    RemoteEntry,
)
from medialane.types.hashing import embedding_key
from medialane.types.request import CompletionDelta, EncoderCard, EngineRequest, ExpandedPrompt, OutputDelta
from medialane.types.tensor import ArenaRange, InlineTensor, TensorDescriptor, TensorSpec
from medialane.worker import media as module
from medialane.worker.media import HeldEmbeddings, entries_read, hold_entries
from waiting import iterations

ENCODER = EncoderCard("d" * 64, "bfloat16", {"image": 8})
ARENA = "a" * 32
SPEC = TensorSpec("bfloat16", (3, 8))
FIRST = OutputDelta("r", [CompletionDelta(0, "x", [1])])
TENSOR = InlineTensor(TensorSpec("uint8", (2,)), memoryview(b"xy"))


def place(spec=SPEC, *, arena=ARENA, offset=4096):
    return TensorDescriptor(spec, ArenaRange(arena, offset, 64 + 4096, 1), 64)


def embedding(mm_hash="h", *, digest=ENCODER.digest, **where):
    return Embedding(embedding_key(mm_hash=mm_hash, encoder=digest), place(**where))


def item(mm_hash="h", sent=None, **fields):
    tensors = (TENSOR,) if sent is None else ()
    plain = MediaPayload("image", mm_hash, b"header", tensors, placeholder=PlaceholderRange(1, 4, b"\1\1\0\1"))
    return msgspec.structs.replace(plain, embedding=sent, **fields)


def request(*items):
    return EngineRequest("r", ExpandedPrompt([1] * 8, items), b"")


class Hold:
    def __init__(self):
        self.num_released = 0

    def release(self):
        self.num_released += 1


class Host:
    """A `HostArena` whose answers a test scripts: an embedding, None, an error, or a future of them."""

    def __init__(self):
        self.answers = {}
        self.asked = []
        self.holds = {}

    def has(self, mm_hash, *, is_filled, **where):
        hold = self.holds[mm_hash] = Hold()
        self.answers[mm_hash] = FoundEmbedding(embedding(mm_hash, **where), hold, is_filled)

    async def embedding(self, wanted, *, wait_s, passed_with=None):
        self.asked.append((*wanted, wait_s))
        answer = self.answers.get(wanted.feature.mm_hash)
        if isinstance(answer, asyncio.Future):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def host():
    return Host()


def is_complete(*mm_hashes):
    return lambda entry: entry in {embedding(mm_hash).tensor.range for mm_hash in mm_hashes}


@pytest.mark.parametrize(
    "sent",
    [
        embedding(digest="e" * 64),
        embedding("other"),
        embedding(spec=TensorSpec("float32", (3, 8))),
        embedding(spec=TensorSpec("bfloat16", (4, 8))),
        embedding(spec=TensorSpec("bfloat16", (3, 9))),
    ],
)
def test_embedding_that_this_encoder_would_not_compute_is_refused(host, sent):
    HeldEmbeddings(ENCODER, host).check([item(sent=embedding())])
    with pytest.raises(HandoverFailed):
        HeldEmbeddings(ENCODER, host).check([item(sent=embedding()), item(sent=sent)])


@pytest.mark.parametrize("encoder", [None, EncoderCard(ENCODER.digest, "bfloat16", {"video": 8})])
def test_embedding_for_a_worker_that_keeps_none_is_refused(host, encoder):
    with pytest.raises(HandoverFailed):
        HeldEmbeddings(encoder, host).check([item(sent=embedding())])


async def test_sent_embedding_is_loaded_without_asking(host):
    found = HeldEmbeddings(ENCODER, host)
    sent = request(item(sent=embedding()))
    assert await found.find(sent, ARENA) == sent
    found.use_sent(sent.prompt.media, ARENA, ENCODER)
    assert found.uses(sent.prompt.media) == [EmbeddingUse(embedding().tensor, is_filled=True)]
    assert not host.asked
    delta = found.on_first_output(FIRST, is_complete())
    assert (delta.embedded, delta.loaded) == (("h",), ("h",))


@pytest.mark.parametrize("mapped", [None, "b" * 32])
async def test_sent_embedding_in_an_arena_that_the_engine_has_not_mapped_is_refused(host, mapped):
    with pytest.raises(HandoverFailed, match="not mapped"):
        HeldEmbeddings(ENCODER, host).use_sent([item(sent=embedding())], mapped, ENCODER)


async def test_found_embedding_replaces_the_tensors_and_is_held_until_the_end(host):
    host.has("h", is_filled=True)
    found = HeldEmbeddings(ENCODER, host)
    remote = RemoteEntry(embedding(arena="b" * 32).tensor.range, "processed", "h", "tcp://h:1", 1, b"")
    changed = await found.find(request(item(remote=remote), item("other")), ARENA)
    found.use_sent(changed.prompt.media, ARENA, ENCODER)
    assert changed.prompt.media[0].remote is None, "its tensors are not copied from the other host"
    assert [(i.tensors, i.embedding) for i in changed.prompt.media] == [((), embedding()), ((TENSOR,), None)]
    assert found.uses(changed.prompt.media) == [EmbeddingUse(embedding().tensor, is_filled=True), None]
    delta = found.on_first_output(FIRST, is_complete())
    assert (delta.embedded, delta.loaded) == (("h",), ("h",))
    assert host.holds["h"].num_released == 0, "the engine may load it again"
    found.release()
    found.release()
    assert host.holds["h"].num_released == 1


@pytest.mark.parametrize("completed", [(), ("h",)])
async def test_embedding_that_is_written_is_released_after_the_first_output(host, completed):
    host.has("h", is_filled=False)
    found = HeldEmbeddings(ENCODER, host)
    changed = await found.find(request(item()), ARENA)
    assert changed.prompt.media[0].tensors == (TENSOR,)
    assert found.uses(changed.prompt.media) == [EmbeddingUse(embedding().tensor, is_filled=False)]
    assert found.ranges == [embedding().tensor.range]
    delta = found.on_first_output(FIRST, is_complete(*completed))
    assert (delta.embedded, delta.loaded) == (completed, ())
    assert host.holds["h"].num_released == 0
    for _ in range(2):
        found.end_writing()
    assert host.holds["h"].num_released == 1
    found.release()
    assert host.holds["h"].num_released == 1


async def test_request_without_output_ends_all_holds(host):
    host.has("h", is_filled=False)
    host.has("i", is_filled=True)
    found = HeldEmbeddings(ENCODER, host)
    await found.find(request(item(), item("i")), ARENA)
    found.release()
    assert [hold.num_released for hold in host.holds.values()] == [1, 1]


@pytest.mark.parametrize("error", [StoreUnavailable("lost"), ArenaFull("full"), HandoverFailed("no")])
async def test_failed_answer_costs_only_the_embedding(host, error):
    host.answers["h"] = error
    host.has("i", is_filled=False)
    found = HeldEmbeddings(ENCODER, host)
    sent = request(item(), item("i"))
    assert await found.find(sent, ARENA) == sent
    assert [use is not None for use in found.uses(sent.prompt.media)] == [False, True]
    found.release()


async def test_late_answer_costs_only_the_embedding(host):
    host.answers["h"] = asyncio.get_running_loop().create_future()
    found = HeldEmbeddings(ENCODER, host)
    async with asyncio.timeout(5):
        await found.find(request(item(embedding_wait_ms=10.0)), ARENA)
    assert found.uses([item()]) == [None]
    assert host.answers["h"].cancelled()


async def test_items_are_asked_for_once_and_side_by_side(host):
    loop = asyncio.get_running_loop()
    host.answers = {"h": loop.create_future(), "i": loop.create_future()}
    found = HeldEmbeddings(ENCODER, host)
    finding = asyncio.create_task(found.find(request(item(), item("i"), item()), ARENA))
    await iterations(3)
    assert [feature.mm_hash for _, feature, _, _ in host.asked] == ["h", "i"]
    for answer in host.answers.values():
        answer.set_result(None)
    await finding


async def test_request_that_is_cancelled_while_an_item_is_looked_up_ends_the_hold_of_the_other(host):
    host.has("h", is_filled=False)
    host.answers["i"] = asyncio.get_running_loop().create_future()
    found = HeldEmbeddings(ENCODER, host)
    finding = asyncio.create_task(found.find(request(item(), item("i")), ARENA))
    await iterations(3)
    finding.cancel()
    await asyncio.wait([finding])
    found.release()
    assert host.holds["h"].num_released == 1


async def test_question_has_the_key_the_header_and_the_time_of_encoding(host):
    await HeldEmbeddings(ENCODER, host).find(request(item(embedding_wait_ms=30.0)), ARENA)
    ((key, feature, spec, wait_s),) = host.asked
    assert (key, spec, wait_s) == (embedding().key, SPEC, 0.03)
    assert (feature.header, feature.tensors, feature.embedding) == (b"header", (), None)


@pytest.mark.parametrize(("wait_ms", "wait_s"), [(1e9, module.MAX_WAIT_S), (-1.0, 0.0)])
async def test_wait_is_limited(host, wait_ms, wait_s):
    await HeldEmbeddings(ENCODER, host).find(request(item(embedding_wait_ms=wait_ms)), ARENA)
    assert host.asked[0][3] == wait_s


@pytest.mark.parametrize(
    "asked",
    [
        (None, item(), ARENA),
        (ENCODER, item(), None),
        (ENCODER, item(modality="audio"), ARENA),
        (ENCODER, item(placeholder=None), ARENA),
        (ENCODER, item(placeholder=PlaceholderRange(1, 2, b"\0\0")), ARENA),
        (ENCODER, item(header=b"x" * (MAX_HEADER_BYTES + 1)), ARENA),
    ],
)
async def test_store_is_not_asked_for_what_cannot_be_kept(host, asked):
    encoder, payload, mapped = asked
    found = HeldEmbeddings(encoder, host)
    sent = request(payload)
    assert await found.find(sent, mapped) is sent
    assert not host.asked
    assert found.on_first_output(FIRST, is_complete()) is FIRST


@pytest.mark.parametrize("wrong", [{"arena": "b" * 32}, {"spec": TensorSpec("bfloat16", (3, 9))}])
async def test_embedding_that_is_not_what_was_asked_for_is_not_used(host, wrong):
    host.has("h", is_filled=True, **wrong)
    found = HeldEmbeddings(ENCODER, host)
    sent = request(item())
    assert await found.find(sent, ARENA) == sent
    assert found.uses(sent.prompt.media) == [None]
    found.release()
    assert host.holds["h"].num_released == 1


async def test_embedding_of_another_host_is_pulled_like_tensors():
    there, here = embedding().tensor.range, ArenaRange("b" * 32, 8192, 64 + 4096, 7)
    granted = RemoteEntry(there, "processed", "key", "tcp://h:1", 1, b"token")

    class Pulling:
        async def pull(self, entries):
            assert list(entries) == [granted]
            return "hold", [LocalCopy(here, "tcp")]

    sent = request(msgspec.structs.replace(item(sent=embedding()), remote=granted))
    assert entries_read(sent.prompt) == {there}
    moved, hold, movers = await hold_entries(sent, (), Pulling())
    assert (entries_read(moved.prompt), hold, movers) == ({here}, "hold", ("tcp",))
    assert moved.prompt.media[0].remote is None
    assert moved.prompt.media[0].embedding == Embedding(embedding().key, TensorDescriptor(SPEC, here, 64))


OTHER = EncoderCard("e" * 64, "bfloat16", {"image": 8})


async def test_embedding_of_an_encoder_that_was_replaced_meanwhile_is_not_loaded(host):
    found = HeldEmbeddings(ENCODER, host)
    sent = request(item(sent=embedding()))
    found.use_sent(sent.prompt.media, ARENA, ENCODER)
    with pytest.raises(HandoverFailed):
        found.use_sent(sent.prompt.media, ARENA, OTHER)


async def test_nothing_is_written_for_an_encoder_that_was_replaced_meanwhile(host):
    host.has("h", is_filled=False)
    found = HeldEmbeddings(ENCODER, host)
    asked = await found.find(request(item()), ARENA)
    found.use_sent((), ARENA, OTHER)
    assert found.uses(asked.prompt.media) == [None]
    found.release()
    assert host.holds["h"].num_released == 1
