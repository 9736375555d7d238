import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medialane.core.errors import InvalidVideo, UnsupportedMediaType
from medialane.media.matroska_header import matroska_tracks, matroska_type
from medialane.media.track import Track
from sound_maker import by_ffmpeg, sound
from video_clips import clip


def tracks(data: bytes) -> list[Track]:
    return list(matroska_tracks(memoryview(data)))


@pytest.mark.parametrize(
    ("container", "codec", "media_type"),
    [("matroska", "libx264", "video/x-matroska"), ("webm", "libvpx-vp9", "video/webm")],
)
def test_pictures_tell_type_size_and_length(container, codec, media_type):
    data = clip(30, fps=10, size=(320, 240), container=container, codec=codec)
    assert matroska_type(memoryview(data)) == media_type
    assert tracks(data) == [Track("video", 3.0, width=320, height=240)]


@pytest.mark.parametrize("channels", [1, 2, 6, 8])
@pytest.mark.parametrize(
    ("coding", "packed"), [("aac", False), ("libopus", False), ("flac", True), ("pcm_s16le", True)]
)
def test_sound_tells_channels_and_whether_they_are_apart(coding, packed, channels):
    (track,) = tracks(by_ffmpeg(sound(48000, channels), 48000, "matroska", coding))
    assert (track.kind, track.num_channels, track.is_packed) == ("audio", channels, packed)
    assert track.duration_s == pytest.approx(0.2, abs=0.03)


def test_tracks_come_in_their_order():
    kinds = [track.kind for track in tracks(by_ffmpeg(sound(16000), 16000, "matroska", "aac", "libx264"))]
    assert kinds == ["video", "audio"]


def test_type_that_is_neither_is_not_taken():
    data = clip(2, container="matroska").replace(b"matroska", b"matryoshk", 1)
    with pytest.raises((UnsupportedMediaType, InvalidVideo)):
        matroska_type(memoryview(data))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damage_ends_the_telling_and_nothing_else(data):
    whole = bytearray(clip(3, container="matroska"))
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(st.integers(0, 600))] = data.draw(st.integers(0, 255))
    tracks(bytes(whole[: data.draw(st.integers(1, len(whole)))]))


def test_elements_that_are_looked_at_are_bounded_over_all_levels():
    """Else a few megabytes would take seconds: each of these tracks has elements of its own."""
    unknown = b"\x01" + b"\xff" * 7
    entries = (b"\xae\x84" + b"\xec\x80" * 2) * 500_000
    data = (
        b"\x1a\x45\xdf\xa3\x8b\x42\x82\x88matroska\x18\x53\x80\x67" + unknown + b"\x16\x54\xae\x6b" + unknown + entries
    )
    started = time.thread_time()
    assert all(track == Track("other") for track in tracks(data))
    assert time.thread_time() - started < 0.5
