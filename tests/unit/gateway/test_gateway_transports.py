"""Which hand-over paths a gateway tries, and in which order; and what each transport sends."""

from typing import NamedTuple

import pytest

from medialane.arena import Arena, ArenaConfig, describe, layout
from medialane.gateway import InlineTransport, PullTransport, ShmTransport, Transport, Transports
from medialane.observability import RequestTimeline
from medialane.types.errors import HandoverFailed
from medialane.types.feature import Embedding, Feature, MediaPayload, RemoteEntry
from medialane.types.media import STAGES, MediaSize
from medialane.types.tensor import ArenaRange, TensorDescriptor, TensorSpec

SPEC = TensorSpec("uint8", (1000,))
NOWHERE = TensorDescriptor(SPEC, ArenaRange("a" * 32, 4096, 1024 + 64, 1), 64)


class Worker(NamedTuple):
    same_host: bool = True
    can_pull: bool = False
    same_processor: bool = True


class Grants:
    async def grant(self, ranges):
        return [RemoteEntry(entry, "processed", "key", "tcp://h:1", 1, b"token") for entry in ranges]


def transports(choice="auto", read=None, max_bytes=1 << 20):
    return Transports([ShmTransport(None), PullTransport(Grants(), "tcp"), InlineTransport(read, max_bytes)], choice)


def paths(stage, choice, worker, prepared=True):
    return [str(path) for path in transports(choice).paths(stage, worker, prepared=prepared)]


FEATURES, DECODED, URL = ([f"{stage}/{name}" for name in ("shm", "inline")] for stage in STAGES)
FEATURES_INLINE, DECODED_INLINE, URL_INLINE = FEATURES[1:], DECODED[1:], URL[1:]
PULLED = [f"{stage}/pull" for stage in STAGES]


@pytest.mark.parametrize(
    ("stage", "choice", "same_host", "same_processor", "prepared", "expected"),
    [
        ("auto", "auto", True, True, True, FEATURES + URL),
        ("auto", "auto", False, True, True, FEATURES_INLINE + URL_INLINE),
        ("auto", "shm", True, True, True, FEATURES[:1] + URL[:1]),
        ("auto", "shm", False, True, True, URL_INLINE),
        ("auto", "inline", True, True, True, FEATURES_INLINE + URL_INLINE),
        ("auto", "auto", True, False, True, DECODED + URL),
        ("auto", "auto", True, True, False, DECODED + URL),
        ("features", "auto", True, True, True, FEATURES),
        ("features", "shm", False, True, True, []),
        ("features", "auto", True, False, True, []),
        ("decoded", "auto", True, False, False, DECODED),
        ("decoded", "inline", True, True, True, DECODED_INLINE),
        ("decoded", "shm", False, True, True, []),
        ("url", "auto", True, True, True, URL),
        ("url", "shm", False, True, True, URL_INLINE),
    ],
)
def test_allowed_transfer_paths_are_tried_best_first(stage, choice, same_host, same_processor, prepared, expected):
    assert paths(stage, choice, Worker(same_host, False, same_processor), prepared) == expected


@pytest.mark.parametrize(
    ("choice", "same_host", "can_pull", "expected"),
    [
        ("auto", False, True, [PULLED[0], *FEATURES_INLINE, PULLED[2], *URL_INLINE]),
        ("tcp", False, True, [PULLED[0], PULLED[2], *URL_INLINE]),
        ("nixl", False, True, [PULLED[0], PULLED[2], *URL_INLINE]),
        ("tcp", True, True, FEATURES[:1] + URL[:1]),
        ("tcp", False, False, URL_INLINE),
        ("shm", False, True, URL_INLINE),
        ("inline", False, True, FEATURES_INLINE + URL_INLINE),
        ("auto", True, True, FEATURES + URL),
    ],
)
def test_store_of_another_host_pulls_what_a_worker_here_would_map(choice, same_host, can_pull, expected):
    assert paths("auto", choice, Worker(same_host, can_pull)) == expected


class Rdma(Transport):
    name = "rdma"
    choices = ("nixl",)

    def reaches(self, worker):
        return worker.can_pull


def test_new_transport_needs_only_an_object():
    added = Transports([Rdma(), InlineTransport(None, 0)])
    assert list(map(str, added.paths("features", Worker(can_pull=True), prepared=True))) == [
        "features/rdma",
        "features/inline",
    ]
    assert list(map(str, added.paths("features", Worker(), prepared=True))) == ["features/inline"]
    chosen = Transports([Rdma(), InlineTransport(None, 0)], "nixl")
    assert list(map(str, chosen.paths("url", Worker(can_pull=True), prepared=False))) == ["url/rdma"]
    assert chosen.carry_embeddings


@pytest.mark.parametrize(("choice", "expected"), [("auto", True), ("shm", True), ("tcp", True), ("inline", False)])
def test_embeddings_are_looked_up_only_if_a_transport_can_send_them(choice, expected):
    assert transports(choice).carry_embeddings == expected


def payload(*tensors, embedding=None):
    return MediaPayload("image", "h", b"", tensors, embedding=embedding)


async def test_shm_sends_descriptors_without_bytes():
    payloads = [payload(NOWHERE)]
    assert await ShmTransport(None).publish(payloads, RequestTimeline()) is payloads


async def test_pull_sends_the_right_to_copy_with_every_entry():
    first, second = await PullTransport(Grants(), "tcp").publish([payload(NOWHERE), payload()], RequestTimeline())
    assert (first.remote.range, first.remote.mover, first.tensors) == (NOWHERE.range, "tcp", (NOWHERE,))
    assert second.remote is None, "an item without large tensors"


async def test_inline_sends_the_bytes_up_to_its_limit():
    arena = Arena.create(ArenaConfig(size_bytes=16 << 20))
    reservation = arena.reserve(layout([SPEC])[1])
    (tensor,) = describe(reservation.range, [SPEC])
    arena.view.tensor(tensor, writable=True)[:] = bytes(range(250)) * 4
    pin = arena.publish(reservation, "k", Feature("image", "k", b"", (tensor,), MediaSize()))
    timeline = RequestTimeline()
    (sent,) = await InlineTransport(arena.view.tensor, SPEC.nbytes).publish([payload(tensor)], timeline)
    assert bytes(sent.tensors[0].data) == bytes(range(250)) * 4
    assert timeline.copied_bytes == SPEC.nbytes
    with pytest.raises(HandoverFailed, match="1000 bytes of media exceed the limit of 999 bytes"):
        await InlineTransport(arena.view.tensor, SPEC.nbytes - 1).publish([payload(tensor)], timeline)
    pin.release()
    del sent
    arena.close()


async def test_inline_does_not_send_embeddings():
    with pytest.raises(HandoverFailed, match="embeddings"):
        await InlineTransport(None, 1 << 20).publish([payload(embedding=Embedding("k", NOWHERE))], RequestTimeline())
