"""Decoding: limits, hostile files, and seeks that equal sequential reading."""

import os
import struct

import numpy as np
import pytest

from medialane.media import MediaConfig, container, probe
from medialane.media.video import open_video
from medialane.types.errors import (
    EmptyMedia,
    InvalidBase64,
    InvalidVideo,
    MediaTooLarge,
    TooManyFrames,
    UnsupportedMediaType,
    VideoTooLarge,
    VideoTooLong,
)
from video_clips import clip, jpegs, remux


def sniff_video(data, config):
    """As in stage `url`: the type by the first bytes, then a look into the file by FFmpeg."""
    media_type = container.sniff_video(data, config)
    probe(memoryview(data), "video", media_type, config)
    return media_type


def read(data, indices, **limits):
    config = MediaConfig(**limits)
    with open_video(memoryview(data), sniff_video(data, config), config) as video:
        return video.source, *video.read(indices)


def box(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(body), kind) + body


FTYP = box(b"ftyp", b"isom\0\0\0\0isom")


def indexed(*tables: bytes) -> bytes:
    """An MP4 with these boxes where its sample tables belong."""
    inner = b"".join(tables)
    for kind in (b"stbl", b"minf", b"mdia", b"trak", b"moov"):
        inner = box(kind, inner)
    return FTYP + inner


@pytest.mark.parametrize(
    ("codec", "container", "media_type"),
    [
        ("libx264", "mp4", "video/mp4"),
        ("libx264", "mov", "video/mp4"),
        ("libx264", "matroska", "video/x-matroska"),
        ("libvpx-vp9", "webm", "video/webm"),
    ],
)
def test_container_is_identified_by_its_bytes(codec, container, media_type):
    assert sniff_video(clip(2, codec=codec, container=container), MediaConfig()) == media_type


def test_jpeg_frame_list_is_identified_by_its_bytes():
    assert sniff_video(jpegs(2), MediaConfig()) == "video/jpeg"


@pytest.mark.parametrize(
    "data",
    [
        b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/a.ts\n",
        b"<?xml version='1.0'?><MPD></MPD>",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n",
        b"RIFF\0\0\0\0AVI LIST",
        b"\x47" + bytes(187),
        b"\x89PNG\r\n\x1a\n",
        box(b"ftyp", b"avif\0\0\0\0mif1"),
        box(b"ftyp", b"heic\0\0\0\0mif1"),
        b"x",
    ],
    ids=["hls", "dash", "ffconcat", "sdp", "avi", "ts", "png", "avif", "heic", "one byte"],
)
def test_other_files_are_rejected_without_decoding(data):
    with pytest.raises(UnsupportedMediaType):
        sniff_video(data, MediaConfig())


def test_empty_and_too_large_files_are_rejected():
    with pytest.raises(EmptyMedia):
        sniff_video(b"", MediaConfig())
    with pytest.raises(MediaTooLarge):
        sniff_video(bytes(11), MediaConfig(max_video_bytes=10))


@pytest.mark.parametrize(
    "data",
    [
        FTYP,
        FTYP + struct.pack(">I4s", 4, b"moov"),
        FTYP + struct.pack(">I4s", 1000, b"moov"),
        indexed(box(b"stsz", struct.pack(">III", 0, 0, 1 << 28))),
        indexed(box(b"stsz", struct.pack(">III", 0, 1, 1 << 28))),
        indexed(box(b"stts", struct.pack(">II", 0, 1 << 28))),
        FTYP + box(b"moov", box(b"cmov", bytes(8))),
    ],
    ids=["no moov", "box of 4 bytes", "moov cut", "stsz", "stsz of one size", "stts", "cmov"],
)
def test_index_with_excessive_claims_is_invalid(data):
    with pytest.raises(InvalidVideo):
        sniff_video(data, MediaConfig())


def test_file_with_external_references_is_rejected():
    reference = box(b"url ", struct.pack(">I", 0) + b"http://127.0.0.1/\0")
    with pytest.raises(UnsupportedMediaType):
        sniff_video(indexed(box(b"dref", struct.pack(">II", 0, 1) + reference)), MediaConfig())


def test_truncated_file_without_index_is_invalid():
    with pytest.raises(InvalidVideo):
        sniff_video(clip(30)[:-200], MediaConfig())


@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"max_video_duration_s": 1.0}, VideoTooLong),
        ({"max_video_pixels": 1000}, VideoTooLarge),
        ({"max_video_frames": 29}, VideoTooLong),
    ],
)
def test_header_claims_are_limited(container, limits, error):
    data = clip(30, container=container)
    with pytest.raises(error):
        sniff_video(data, MediaConfig(**limits))


def test_frames_of_a_jpeg_list_are_bounded():
    for data, limits, error in [
        (jpegs(5), {"max_sampled_frames": 4}, TooManyFrames),
        (jpegs(1) + b"," + jpegs(1, (32, 32)), {}, InvalidVideo),
        (jpegs(1) + b",?", {}, InvalidBase64),
        (jpegs(1), {"max_video_pixels": 100}, VideoTooLarge),
        (jpegs(3), {"max_video_decoded_bytes": 20_000}, VideoTooLarge),
    ]:
        with pytest.raises(error):
            sniff_video(data, MediaConfig(**limits))


@pytest.mark.parametrize("codec", ["libx264", "libx265", "libvpx-vp9", "libsvtav1"])
def test_seeking_gives_the_same_frames_as_sequential_reading(codec):
    data = clip(60, codec=codec, container="matroska", gop=8, b_frames=0 if "x26" not in codec else 3)
    _, every, _ = read(data, range(60))
    for wanted in ([0, 59], [58], [7, 8, 9], list(range(3, 60, 11))):
        _, frames, valid = read(data, wanted)
        assert valid == wanted
        assert np.array_equal(frames, every[wanted])


def test_source_reports_count_rate_and_duration():
    source, _, _ = read(clip(30, fps=10), [0])
    assert (source.num_frames, source.fps, source.duration_s) == (30, 10.0, 3.0)


def test_frames_hidden_by_an_edit_list_are_not_counted():
    source, _, _ = read(remux(clip(60, gop=20), shift=-25), [0])
    assert source.num_frames == 35


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"max_video_duration_s": 1.0}, VideoTooLong),
        ({"max_video_frames": 20}, VideoTooLong),
        ({"max_video_pixels": 1000}, VideoTooLarge),
        ({"max_sampled_frames": 29}, TooManyFrames),
        ({"max_video_decoded_bytes": 100_000}, VideoTooLarge),
    ],
)
def test_limits_are_enforced(limits, error):
    with pytest.raises(error):
        read(clip(30), range(30), **limits)


def test_tags_in_any_encoding_are_ignored():
    data = clip(3).replace(b"isomiso2", b"isD\x89\x88so2", 1)
    assert b"\x89" in data[:40]
    assert read(data, [0])[2] == [0]


def test_day_of_black_frames_exceeds_the_limit():
    data = clip(5, pts=[0, 1, 2, 3, 86_400], ticks=1, fps=1)
    with pytest.raises(VideoTooLong):
        read(data, [0])


def test_noise_after_a_header_is_invalid():
    for head in (FTYP + box(b"moov", b""), clip(2, container="matroska")[:200]):
        with pytest.raises(InvalidVideo):
            read(head + os.urandom(5000), [0])


def test_file_without_frames_is_invalid():
    from io import BytesIO

    import av

    out = BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        frame.rate = 16000
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    with pytest.raises(InvalidVideo):
        read(out.getvalue(), [0])


def test_closed_video_releases_its_bytes():
    data = clip(3)
    view = memoryview(data)
    with open_video(view, "video/mp4", MediaConfig()) as video:
        assert video.data is view
