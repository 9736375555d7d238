import struct
from contextlib import suppress

import pytest

from audio_maker import FILES, by_ffmpeg, by_libsndfile, tones
from medialane.media import MediaConfig, container, probe, sniff
from medialane.types.errors import (
    AudioTooLong,
    EmptyMedia,
    InvalidAudio,
    MedialaneError,
    MediaTooLarge,
    UnsupportedMediaType,
)

CONFIG = MediaConfig()


def sniff_audio(data, config):
    """As in stage `url`: the type by the first bytes, then a look into the file by the libraries that decode it."""
    media_type = container.sniff_audio(data, config)
    probe(memoryview(data), "audio", media_type, config)
    return media_type


def wav(*, channels=1, rate=8000, coding=1, block_bytes=2, num_bytes=1000, claimed=None, before=b"") -> bytes:
    layout = struct.pack("<HHIIHH", coding, channels, rate, rate * block_bytes, block_bytes, 16)
    data = struct.pack("<4sI", b"data", num_bytes if claimed is None else claimed) + bytes(num_bytes)
    parts = b"WAVE" + before + struct.pack("<4sI", b"fmt ", 16) + layout + data
    return b"RIFF" + struct.pack("<I", len(parts)) + parts


def flac(*, channels=2, rate=44100, num_samples=1000) -> bytes:
    info = bytes(10) + ((rate << 44) | (channels - 1) << 41 | 15 << 36 | num_samples).to_bytes(8, "big") + bytes(16)
    return b"fLaC\x80\x00\x00\x22" + info


@pytest.mark.parametrize(
    ("container", "coding", "expected"),
    [
        ("WAV", None, "audio/wav"),
        ("FLAC", None, "audio/flac"),
        ("MP3", None, "audio/mpeg"),
        ("OGG", "VORBIS", "audio/ogg"),
        ("OGG", "OPUS", "audio/ogg"),
    ],
)
@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview])
def test_type_of_libsndfile_output(container, coding, expected, buffer):
    assert sniff_audio(buffer(by_libsndfile(tones(16000), 16000, container, coding)), CONFIG) == expected


@pytest.mark.parametrize(
    ("container", "coding", "expected"),
    [
        ("ipod", "aac", "audio/mp4"),
        ("mp4", "aac", "video/mp4"),
        ("mov", "aac", "video/mp4"),
        ("webm", "libopus", "video/webm"),
        ("matroska", "flac", "video/x-matroska"),
        ("adts", "aac", "audio/aac"),
        ("mp3", "libmp3lame", "audio/mpeg"),  # with ID3 tags
    ],
)
def test_type_of_ffmpeg_output(container, coding, expected):
    data = by_ffmpeg(tones(16000), 16000, container, coding)
    assert sniff_audio(data, CONFIG) == expected
    assert sniff(data, "audio", CONFIG) == expected


@pytest.mark.parametrize(
    "data",
    [
        b"hello, this text is named speech.wav",
        "﻿<html>".encode("utf-16-le"),
        b"\xff\xfet\0e\0x\0t\0",
        b"RIFF\0\0\0\0AVI LIST",
        b"RIFF\0\0\0\0WEBPVP8 ",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff\xe0\0\x10JFIF",
        b"\0\0\0\x1cftypavif\0\0\0\0",
        b"\0\0\0\x1cftypheic\0\0\0\0",
        b"\x1a\x45\xdf\xa3 of another kind",
        b"#EXTM3U\n",
        b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\n",
        b"ffconcat version 1.0\n",
        b"FORM\0\0\0\0AIFFCOMM",
        b"ID3",
        b"\xff",
        b"\0",
    ],
    ids=repr,
)
def test_non_audio_is_rejected(data):
    with pytest.raises(UnsupportedMediaType):
        sniff_audio(data, CONFIG)


def test_empty_input_is_empty_media():
    with pytest.raises(EmptyMedia):
        sniff_audio(b"", CONFIG)


def test_audio_and_video_have_separate_limits():
    config = MediaConfig(max_audio_bytes=1000, max_video_bytes=100_000)
    with pytest.raises(MediaTooLarge):
        sniff_audio(wav(num_bytes=2000), config)
    video = FILES["video"]()
    assert sniff_audio(video, config) == "video/mp4"
    with pytest.raises(MediaTooLarge):
        sniff_audio(video + bytes(100_000), config)


@pytest.mark.parametrize("make", [wav, flac])
def test_impossible_sample_rate_is_invalid(make):
    assert sniff_audio(make(rate=192_000), CONFIG)
    for rate in (0, 999, 768_001):
        with pytest.raises(InvalidAudio):
            sniff_audio(make(rate=rate), CONFIG)


def test_channel_count_is_limited():
    assert sniff_audio(wav(channels=8), CONFIG)
    for channels in (0, 9, 64, 65535):
        with pytest.raises(InvalidAudio):
            sniff_audio(wav(channels=channels), CONFIG)
    with pytest.raises(InvalidAudio):
        sniff_audio(flac(channels=3), MediaConfig(max_audio_channels=2))


def test_length_claimed_by_a_flac_is_limited():
    assert sniff_audio(flac(num_samples=600 * 44100), CONFIG)
    for num_samples in (600 * 44100 + 1, 24 * 3600 * 44100, (1 << 36) - 1):
        with pytest.raises(AudioTooLong):
            sniff_audio(flac(num_samples=num_samples), CONFIG)
    with pytest.raises(AudioTooLong):
        sniff_audio(flac(num_samples=1001), MediaConfig(max_audio_decoded_bytes=8000))


def test_wav_length_follows_its_bytes_not_its_header():
    for claimed in (0, 100, 2**32 - 1):
        assert sniff_audio(wav(claimed=claimed), CONFIG) == "audio/wav"
    with pytest.raises(AudioTooLong):
        sniff_audio(wav(rate=1000, num_bytes=2 * 1000 * 601), CONFIG)


def test_wav_with_unknown_codec_is_left_to_the_decoder():
    data = wav(coding=0x55, block_bytes=1, rate=1000, num_bytes=700_000)
    assert sniff(data, "audio", CONFIG) == "audio/wav"
    with pytest.raises(InvalidAudio):
        sniff_audio(data, CONFIG)


def test_chunks_before_the_format_chunk_are_skipped():
    assert sniff_audio(wav(before=b"LIST\x03\0\0\0abc\0"), CONFIG) == "audio/wav"


@pytest.mark.parametrize("nbytes", [12, 19, 30, 40])
def test_wav_truncated_within_its_header_is_invalid(nbytes):
    with pytest.raises(InvalidAudio):
        sniff_audio(wav()[:nbytes], CONFIG)


def test_flac_truncated_within_its_header_is_invalid():
    for nbytes in (4, 7, 20):
        with pytest.raises(InvalidAudio):
            sniff_audio(flac()[:nbytes], CONFIG)


def test_too_many_chunks_before_the_samples_are_invalid():
    with pytest.raises(InvalidAudio):
        sniff_audio(wav(before=b"JUNK\0\0\0\0" * 100_000), CONFIG)


def test_samples_before_the_format_chunk_are_invalid():
    with pytest.raises(InvalidAudio):
        sniff_audio(wav(before=b"data\0\0\0\0"), CONFIG)


@pytest.mark.parametrize(
    ("container", "coding"),
    [("ipod", "aac"), ("mov", "aac"), ("adts", "aac"), ("matroska", "aac"), ("webm", "libopus")],
)
def test_eight_planar_channels_are_rejected_by_the_header(container, coding):
    with pytest.raises(InvalidAudio, match="8 channels"):
        sniff_audio(by_ffmpeg(tones(48000, 8), 48000, container, coding), CONFIG)


@pytest.mark.parametrize(("container", "coding"), [("mov", "pcm_s16le"), ("matroska", "flac"), ("ogg", "libopus")])
def test_eight_interleaved_channels_are_accepted(container, coding):
    assert sniff_audio(by_ffmpeg(tones(48000, 8), 48000, container, coding), CONFIG)


@pytest.mark.parametrize("kind", FILES)
def test_channels_claimed_by_a_header_are_limited(kind):
    data, config = FILES[kind](), MediaConfig(max_audio_channels=1)
    with pytest.raises(InvalidAudio, match="2 channels"):
        sniff_audio(data, config)


@pytest.mark.parametrize("kind", ["m4a", "video", "webm", "wav", "flac"])
def test_length_claimed_by_a_header_is_limited(kind):
    with pytest.raises(AudioTooLong):
        sniff_audio(FILES[kind](), MediaConfig(max_audio_duration_s=0.15))


def test_mp4_without_index_or_with_external_references_is_rejected():
    data = FILES["m4a"]()
    with pytest.raises(InvalidAudio):
        sniff_audio(data[:100], CONFIG)
    place = data.index(b"url ", data.index(b"dref")) + 4
    with pytest.raises(UnsupportedMediaType):
        sniff_audio(data[:place] + bytes(4) + data[place + 4 :], CONFIG)


def test_every_data_reference_of_an_mp4_is_checked():
    """Beyond the first track and the first entry, and whatever the kind of the reference."""
    data = FILES["video"]()
    first = data.index(b"url ", data.index(b"dref"))
    second = data.index(b"url ", data.index(b"dref", first))
    for place in (first, second):
        with pytest.raises(UnsupportedMediaType):
            sniff_audio(data[: place + 4] + bytes(4) + data[place + 8 :], CONFIG)
    name_alone = struct.pack(">I", 40) + b"free" + b"dref" + b"\0\0\0\1" * 7
    assert sniff_audio(data + name_alone, CONFIG)


@pytest.mark.parametrize("kind", FILES)
def test_any_truncation_is_identified_or_rejected(kind):
    data = FILES[kind]()
    for end in (*range(1, 400), *range(400, len(data), 97)):
        with suppress(MedialaneError):
            sniff_audio(data[:end], CONFIG)
