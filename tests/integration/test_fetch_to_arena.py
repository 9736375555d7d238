"""Bodies from an origin into the arena: one download and one copy for concurrent callers, no leaks after failures."""

from __future__ import annotations

import asyncio
import io
import tracemalloc
from contextlib import asynccontextmanager

import pytest
from gateway_parts import UNCOUNTED, Parts, png
from host_store import HostStore, fetching
from PIL import Image as PILImage

from audio_maker import by_ffmpeg, hours_of_silence, tones
from http_origin import HttpOrigin, answer
from medialane.gateway import open_scope
from medialane.media import MediaConfig
from medialane.observability import RequestTimeline
from medialane.testing.fake_processor import PLACEHOLDER_TOKEN
from medialane.types.errors import (
    ArenaFull,
    AudioTooLong,
    ImageTooLarge,
    InvalidAudio,
    InvalidImage,
    InvalidVideo,
    MediaFetchTimeout,
    MediaTooLarge,
    UpstreamFailed,
    VideoTooLong,
)
from medialane.types.feature import MediaPrompt
from medialane.types.hashing import content_hash
from medialane.types.media import MediaRef
from video_clips import clip
from waiting import eventually

MIB = 1 << 20
LOCAL = {"allowed_media_networks": ("127.0.0.0/8",)}


def bmp(side: int) -> bytes:
    """Three bytes a pixel."""
    file = io.BytesIO()
    PILImage.new("RGB", (side, side), (1, 2, 3)).save(file, "BMP")
    return file.getvalue()


def image(url: str, number: int = 0, **fields: object) -> MediaRef:
    return MediaRef("image", f"messages[0].content[{number}].image_url", url=url, **fields)


@pytest.fixture
async def origin():
    async with HttpOrigin() as origin:
        yield origin


@asynccontextmanager
async def source_of(arena, preparers=None, **limits):
    media = MediaConfig(**LOCAL, **limits)
    async with fetching(arena, media) as fetcher, HostStore(arena, preparers, fetcher, media=media) as store:
        yield store.store_items


async def in_pieces(writer: asyncio.StreamWriter, body: bytes, piece: int = 64 * 1024) -> None:
    for at in range(0, len(body), piece):
        writer.write(body[at : at + piece])
        await writer.drain()


def first_half(body: bytes, gate: asyncio.Event):
    """Send half of the body, and the rest when the gate opens."""

    async def write(request, writer):
        writer.write(f"HTTP/1.1 200 X\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        await in_pieces(writer, body[: len(body) // 2])
        await gate.wait()
        await in_pieces(writer, body[len(body) // 2 :])

    return write


async def test_different_options_need_no_new_download_or_copy(arena, preparers, origin):
    body = png()
    origin.routes["/a"] = answer(200, body, cache_control="max-age=60")
    async with source_of(arena, preparers) as source:
        sizes = []
        for options in (b"{}", b'{"scale":2}'):
            timeline = RequestTimeline()
            found = await source.processed(image(origin.url("/a")), options, timeline, UNCOUNTED)
            sizes.append(timeline.copied_bytes - found.feature.nbytes)
            found.hold.release()
        encoded = await source.encoded(image(origin.url("/a")), b"{}", RequestTimeline(), UNCOUNTED)
        assert encoded.content_hash == content_hash(body)
        encoded.hold.release()
    assert sizes == [0, 0]
    assert preparers.stats().num_done == 2
    assert len(origin.requests) == 1


async def test_item_and_decode_options_give_distinct_features(arena, preparers, origin):
    origin.routes["/a"] = answer(200, png(), cache_control="max-age=60")
    async with source_of(arena, preparers) as source:
        keys = set()
        for fields in ({}, {"options": b'{"scale":2}'}, {"io": b'{"image_mode":"RGB"}'}):
            found = await source.processed(image(origin.url("/a"), **fields), b"{}", RequestTimeline(), UNCOUNTED)
            keys.add(found.feature.mm_hash)
            found.hold.release()
        common = await source.processed(image(origin.url("/a")), b'{"scale":2}', RequestTimeline(), UNCOUNTED)
        assert common.feature.mm_hash in keys, "the same options, wherever they were given"
        common.hold.release()
    assert len(keys) == 3
    assert preparers.stats().num_done == 3


async def test_unchanged_content_is_not_downloaded_again(arena, origin):
    async def write(request, writer):
        again = request.headers.get("if-none-match") == '"1"'
        await (answer(304, content_length=None) if again else answer(200, png(), etag='"1"'))(request, writer)

    origin.routes["/a"] = write
    async with source_of(arena) as source:
        ranges = []
        for _ in range(2):
            found = await source.encoded(image(origin.url("/a")), b"{}", RequestTimeline(), UNCOUNTED)
            ranges.append(found.feature.entry)
            found.hold.release()
    assert ranges[0] == ranges[1]
    assert ["if-none-match" in request.headers for request in origin.requests] == [False, True]


async def test_evicted_content_is_downloaded_again(arena, origin):
    origin.routes["/a"] = answer(200, png(), cache_control="max-age=60")
    async with source_of(arena) as source:
        for _ in range(2):
            (await source.encoded(image(origin.url("/a")), b"{}", RequestTimeline(), UNCOUNTED)).hold.release()
            await eventually(lambda: arena.stats().num_leases == 0)
            arena.clear()
    assert len(origin.requests) == 2


async def test_inline_and_fetched_content_share_one_entry(arena, origin):
    origin.routes["/a"] = answer(200, png())
    async with source_of(arena) as source:
        sent = await source.encoded(MediaRef("image", "p", data=png()), b"{}", RequestTimeline(), UNCOUNTED)
        fetched = await source.encoded(image(origin.url("/a")), b"{}", RequestTimeline(), UNCOUNTED)
        assert fetched.feature.entry == sent.feature.entry
        assert arena.stats().num_entries == 1
        sent.hold.release()
        fetched.hold.release()


async def test_local_file_is_not_copied_to_the_heap(arena, tmp_path):
    body = bmp(2000)
    (tmp_path / "a.bmp").write_bytes(body)
    async with source_of(arena, allowed_local_media_path=str(tmp_path)) as source:
        tracemalloc.start()
        pin = await source.encoded(image(f"file://{tmp_path}/a.bmp"), b"{}", RequestTimeline(), UNCOUNTED)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert pin.content_hash == content_hash(body)
        assert pin.feature.nbytes == len(body) > 11 * MIB
        pin.hold.release()
    assert peak < 4 * MIB  # chunks of 1 MiB: one here, and one that each of two threads has not let go of yet


async def test_file_that_is_not_an_image_leaves_no_entry(arena, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"no image at all")
    async with source_of(arena, allowed_local_media_path=str(tmp_path)) as source:
        with pytest.raises(InvalidImage):
            await source.encoded(image(f"file://{tmp_path}/a.txt"), b"{}", RequestTimeline(), UNCOUNTED)
    assert (arena.stats().num_reservations, arena.stats().num_entries) == (0, 0)


async def test_large_body_is_not_copied_to_the_heap(arena, origin):
    body = bmp(1500)

    async def write(request, writer):
        writer.write(f"HTTP/1.1 200 X\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        await in_pieces(writer, body)

    origin.routes["/a"] = write
    async with source_of(arena) as source:
        tracemalloc.start()
        pin = await source.encoded(image(origin.url("/a")), b"{}", RequestTimeline(), UNCOUNTED)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert pin.feature.nbytes == len(body) > 6 * MIB
        pin.hold.release()
    assert peak < 2 * MIB


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"max_image_bytes": MIB}, MediaTooLarge),
        ({"image_fetch_timeout_s": 0.5}, MediaFetchTimeout),
    ],
    ids=["cap", "deadline"],
)
async def test_body_over_a_limit_leaves_no_entry(arena, origin, limits, error):
    body = bmp(1000)

    async def write(request, writer):
        writer.write(b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n")
        for at in range(0, len(body), 100_000):
            piece = body[at : at + 100_000]
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.05)  # time: the origin's rate
        await asyncio.Event().wait()

    origin.routes["/a"] = write
    async with source_of(arena, **limits) as source:
        with pytest.raises(error) as failed:
            await source.encoded(image(origin.url("/a")), b"{}", RequestTimeline(), UNCOUNTED)
        assert failed.value.param == "messages[0].content[0].image_url"
    assert (arena.stats().num_reservations, arena.stats().num_entries) == (0, 0)


async def test_truncated_or_non_image_body_leaves_no_entry(arena, origin):
    async def cut(request, writer):
        await answer(200, png(), content_length=str(len(png()) + 1))(request, writer)
        raise ConnectionError

    origin.routes["/cut"] = cut
    origin.routes["/text"] = answer(200, b"no image at all")
    async with source_of(arena) as source:
        for path, error in (("/cut", UpstreamFailed), ("/text", InvalidImage)):
            with pytest.raises(error):
                await source.encoded(image(origin.url(path)), b"{}", RequestTimeline(), UNCOUNTED)
    assert (arena.stats().num_reservations, arena.stats().num_entries) == (0, 0)


@pytest.mark.parametrize(
    ("modality", "make", "error"),
    [
        ("image", lambda: bmp(200)[:18] + (65_000).to_bytes(4, "little") * 2 + bmp(200)[26:], ImageTooLarge),
        ("video", lambda: clip(3, pts=[0, 1, 86_400], ticks=1, fps=1), VideoTooLong),
        ("video", lambda: clip(3)[:-300], InvalidVideo),
        ("audio", lambda: by_ffmpeg(tones(48000, 8), 48000, "ipod", "aac"), InvalidAudio),
        ("audio", lambda: hours_of_silence("ipod", "aac", 48000, 1800), AudioTooLong),
    ],
    ids=["size", "length", "index", "channels", "length of an audio clip"],
)
@pytest.mark.parametrize("sent", [True, False])
async def test_oversized_header_is_rejected_before_a_worker_decodes(
    arena, preparers, origin, modality, make, error, sent
):
    """Stage `url`: the worker receives encoded bytes, and these are rejected first."""
    data = make()
    origin.routes["/a"] = answer(200, data)
    ref = MediaRef(modality, "p", data=data) if sent else MediaRef(modality, "p", url=origin.url("/a"))
    async with source_of(arena, preparers) as source:
        with pytest.raises(error):
            await source.encoded(ref, b"{}", RequestTimeline(), UNCOUNTED)
    assert (arena.stats().num_reservations, arena.stats().num_entries) == (0, 0)
    assert preparers.stats().num_restarts == 0


async def test_media_for_a_worker_are_probed_once_and_images_with_known_headers_never(arena, preparers):
    refs = [MediaRef("image", "p", data=png()), *(MediaRef("video", "p", data=clip(3)) for _ in range(3))]
    async with source_of(arena, preparers) as source:
        found = await asyncio.gather(*(source.encoded(ref, b"{}", RequestTimeline(), UNCOUNTED) for ref in refs))
        assert preparers.stats().num_done == 1
        (await source.encoded(refs[-1], b"{}", RequestTimeline(), UNCOUNTED)).hold.release()
        assert preparers.stats().num_done == 1
        audio_track = MediaRef("audio", "p", data=clip(3))
        with pytest.raises(InvalidAudio, match="no audio track"):
            await source.encoded(audio_track, b"{}", RequestTimeline(), UNCOUNTED)
    for one in found:
        one.hold.release()


async def test_feature_evicted_when_unpinned_is_prepared_once(arena, preparers, monkeypatch):
    """As in an arena that is far too small: every waiter gets the result without another look-up."""
    make = preparers.prepare_item

    async def made(*args, **kwargs):
        pin = await make(*args, **kwargs)
        asyncio.get_running_loop().call_soon(arena.clear)
        return pin

    monkeypatch.setattr(preparers, "prepare_item", made)
    async with source_of(arena, preparers) as source:
        ref = MediaRef("image", "p", data=png())
        found = await asyncio.gather(*(source.processed(ref, b"{}", RequestTimeline(), UNCOUNTED) for _ in range(2)))
        assert preparers.stats().num_done == 1
        assert found[0].feature.tensors[0].range == found[1].feature.tensors[0].range
        for one in found:
            one.hold.release()
        await eventually(lambda: arena.stats().num_leases == 0)


async def test_feature_larger_than_the_arena_is_rejected_permanently_after_one_preparation(arena, preparers):
    """32 MiB of arena: the fake's float32 makes 48 MB of these 4 megapixels."""
    ref = MediaRef("image", "messages[0].content[0].image_url", data=png(2000, 2000))
    async with source_of(arena, preparers) as source:
        for _ in range(2):
            with pytest.raises(MediaTooLarge) as refused:
                await source.processed(ref, b"{}", RequestTimeline(), UNCOUNTED)
            assert (refused.value.status, refused.value.param) == (413, ref.param)
            assert preparers.stats().num_failed == 1


async def test_bytes_larger_than_the_arena_are_rejected_permanently(arena, preparers):
    data = bmp(3400)
    async with source_of(arena, preparers, max_image_bytes=64 * MIB) as source:
        with pytest.raises(MediaTooLarge) as refused:
            await source.encoded(MediaRef("image", "p", data=data), b"{}", RequestTimeline(), UNCOUNTED)
        assert refused.value.status == 413


async def test_body_is_rejected_while_the_arena_is_full_and_accepted_later(arena, origin):
    origin.routes["/a"] = answer(200, bmp(1000))
    held = arena.reserve(30 * MIB)
    async with source_of(arena) as source:
        with pytest.raises(ArenaFull):
            await source.encoded(image(origin.url("/a")), b"{}", RequestTimeline(), UNCOUNTED)
        assert arena.stats().num_reservations == 1, "the one above"
        held.abandon()
        (await source.encoded(image(origin.url("/a")), b"{}", RequestTimeline(), UNCOUNTED)).hold.release()


async def test_fetch_continues_for_a_remaining_caller_and_stops_without_callers(arena, origin):
    gate, body = asyncio.Event(), bmp(600)
    origin.routes["/a"] = first_half(body, gate)
    async with source_of(arena) as source:
        for num_wanting in (1, 0):
            both = [
                asyncio.create_task(source.encoded(image(origin.url("/a")), b"{}", RequestTimeline(), UNCOUNTED))
                for _ in range(2)
            ]
            await eventually(lambda: arena.stats().num_reservations == 1)
            for task in both[num_wanting:]:
                task.cancel()
            if num_wanting:
                gate.set()
                found = await both[0]
                assert found.content_hash == content_hash(body)
                found.hold.release()
            await asyncio.wait(both)
            assert [task.cancelled() for task in both] == [not num_wanting, True]
            await eventually(lambda: arena.stats().num_reservations == 0)
            gate.clear()
            arena.clear()
    assert len(origin.requests) == 2


async def test_sixteen_bodies_of_one_request_arrive_concurrently(arena, preparers, origin):
    waiting, all_there = 0, asyncio.Event()

    async def write(request, writer):
        nonlocal waiting
        waiting += 1
        if waiting == 16:
            all_there.set()
        await all_there.wait()
        await answer(200, png(seed=int(request.path[1:])))(request, writer)

    origin.routes = {f"/{n}": write for n in range(16)}
    items = tuple(image(origin.url(f"/{n}"), n) for n in range(16))
    async with fetching(arena, MediaConfig(**LOCAL)) as fetcher, Parts(arena, preparers, [], fetcher=fetcher) as parts:
        with open_scope():
            prepared = await parts.gateway.prepare(MediaPrompt([PLACEHOLDER_TOKEN] * 16, items))
    assert origin.num_connections == 16
    assert len({placed.feature.mm_hash for placed in prepared.features}) == 16


@pytest.mark.parametrize(
    ("limits", "most"), [({"max_fetches_per_host": 3}, 6), ({"max_fetches": 4}, 4)], ids=["per host", "total"]
)
async def test_concurrent_fetches_are_bounded(arena, limits, most):
    in_flight = peak = 0

    async def write(request, writer):
        nonlocal in_flight, peak
        in_flight += 1
        peak = max(peak, in_flight)
        await asyncio.sleep(0.05)  # time: in which fetches overlap
        in_flight -= 1
        await answer(200, png(seed=int(request.path[1:])))(request, writer)

    routes = {f"/{n}": write for n in range(8)}
    async with HttpOrigin(dict(routes)) as one, HttpOrigin(dict(routes)) as other, source_of(arena, **limits) as source:
        refs = [image(origin.url(f"/{n}")) for n in range(8) for origin in (one, other)]
        pins = await asyncio.gather(*(source.encoded(ref, b"{}", RequestTimeline(), UNCOUNTED) for ref in refs))
        for found in pins:
            found.hold.release()
        assert peak == most
        assert len(one.requests) == len(other.requests) == 8
