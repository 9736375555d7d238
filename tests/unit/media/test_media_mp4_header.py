import struct
from dataclasses import replace

import pytest

from medialane.core.errors import InvalidVideo
from medialane.media.mp4_header import check_mp4, mp4_tracks
from medialane.media.track import Track
from sound_maker import by_ffmpeg, sound
from video_clips import clip


def tracks(data: bytes) -> list[Track]:
    check_mp4(memoryview(data))
    return list(mp4_tracks(memoryview(data)))


@pytest.mark.parametrize("container", ["mp4", "mov"])
def test_pictures_tell_size_and_length(container):
    assert tracks(clip(30, fps=10, size=(320, 240), container=container)) == [Track("video", 3.0, 30, 320, 240)]


def test_frames_of_every_run_count():
    data = clip(5, pts=[0, 1, 2, 30, 31], ticks=10, fps=10)
    assert tracks(data)[0].num_frames == 5


@pytest.mark.parametrize("channels", [1, 2, 6, 8])
@pytest.mark.parametrize(
    ("container", "coding", "packed"),
    [("ipod", "aac", False), ("mov", "aac", False), ("mov", "pcm_s16le", True), ("mp4", "flac", True)],
)
def test_sound_tells_channels_and_whether_they_are_apart(container, coding, packed, channels):
    (track,) = tracks(by_ffmpeg(sound(48000, channels), 48000, container, coding))
    assert replace(track, duration_s=0.2) == Track("audio", 0.2, num_channels=channels, is_packed=packed)
    assert track.duration_s == pytest.approx(0.2, abs=0.03)


def test_aacs_own_configuration_has_the_last_word():
    """As in FFmpeg: the sample entry of many files says two, whatever there is."""
    data = by_ffmpeg(sound(48000, 8), 48000, "ipod", "aac")
    place = data.index(b"mp4a") + 20
    assert data[place : place + 2] == struct.pack(">H", 8)
    (track,) = tracks(data[:place] + struct.pack(">H", 2) + data[place + 2 :])
    assert track.num_channels == 8


def test_tracks_come_in_their_order():
    assert [track.kind for track in tracks(by_ffmpeg(sound(16000), 16000, "mp4", "aac", "mpeg4"))] == ["video", "audio"]


def test_length_that_is_not_known_is_none():
    data = bytearray(clip(3))
    place = data.index(b"mdhd") + 20
    data[place : place + 4] = b"\xff" * 4
    assert tracks(bytes(data))[0].duration_s == 0


def test_second_handler_of_quicktime_is_not_the_tracks():
    data = by_ffmpeg(sound(16000), 16000, "mov", "aac", "libx264")
    assert data.count(b"hdlr") > 2
    assert [track.kind for track in tracks(data)][:2] == ["video", "audio"]


def test_table_of_a_million_runs_is_counted_at_once():
    runs = struct.pack(">II", 0, 1_000_000) + struct.pack(">II", 1, 1) * 1_000_000
    trak = _box(
        b"trak", _box(b"mdia", _box(b"hdlr", bytes(8) + b"vide") + _box(b"minf", _box(b"stbl", _box(b"stts", runs))))
    )
    data = _box(b"ftyp", b"isom\0\0\0\0") + _box(b"moov", trak)
    assert tracks(data)[0].num_frames == 1_000_000


def _box(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", 8 + len(data)) + kind + data


@pytest.mark.parametrize("num_tracks", [10, 3000])
def test_tracks_that_are_looked_at_are_bounded(num_tracks):
    trak = _box(b"trak", _box(b"mdia", _box(b"hdlr", bytes(8) + b"text")))
    found = tracks(_box(b"ftyp", b"isom\0\0\0\0") + _box(b"moov", trak * num_tracks))
    assert len(found) == min(num_tracks, 64)


def test_boxes_without_end_are_refused_at_once():
    with pytest.raises(InvalidVideo, match="too many boxes"):
        check_mp4(memoryview(_box(b"ftyp", b"isom\0\0\0\0") + _box(b"free", b"") * 1_000_000))
