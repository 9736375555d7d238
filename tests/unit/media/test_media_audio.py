"""Equality with vLLM is tested in `tests/contract/test_audio_exactness.py`; here are limits, errors and edges."""

import re
import struct
import subprocess
import sys
import time
import tracemalloc
from functools import cache
from io import BytesIO

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from audio_maker import FILES, by_ffmpeg, by_libsndfile, hours_of_silence, tones
from decoded_media import decode_audio
from medialane.media import MediaConfig
from medialane.types.errors import (
    AudioTooLong,
    EmptyMedia,
    InvalidAudio,
    MedialaneError,
    MediaTooLarge,
    UnsupportedMediaType,
)

CONFIG = MediaConfig()
MIB = 1 << 20


@cache
def encoded(kind: str) -> bytes:
    return FILES[kind]()


def decode(data: bytes, config: MediaConfig = CONFIG):
    return decode_audio(memoryview(data), config)


@pytest.mark.parametrize("kind", FILES)
def test_audio_is_mono_at_its_native_rate(kind):
    decoded = decode(encoded(kind))
    assert decoded.sample_rate == {"wav": 8000, "flac": 8000, "webm": 48000}.get(kind, 16000)
    assert decoded.samples.dtype == np.float32
    assert 0.2 <= decoded.size.num_samples / decoded.sample_rate < 0.4
    assert 0.05 < decoded.samples.std() < 1


@pytest.mark.parametrize("kind", FILES)
def test_result_does_not_reference_the_encoded_bytes(kind):
    data = bytearray(encoded(kind))
    decoded = decode_audio(memoryview(data), CONFIG)
    before = decoded.samples.copy()
    data[:] = bytes(len(data))
    assert np.array_equal(decoded.samples, before)


@pytest.mark.parametrize("kind", FILES)
def test_part_of_a_buffer_is_decoded(kind):
    data = encoded(kind)
    padded = memoryview(b"x" * 7 + data + b"x" * 7)
    assert np.array_equal(decode_audio(padded[7:-7], CONFIG).samples, decode(data).samples)


@pytest.mark.parametrize("kind", FILES)
def test_length_limits_are_enforced(kind):
    assert decode(encoded(kind), MediaConfig(max_audio_duration_s=0.4))
    with pytest.raises(AudioTooLong):
        decode(encoded(kind), MediaConfig(max_audio_duration_s=0.15))
    with pytest.raises(AudioTooLong):
        decode(encoded(kind), MediaConfig(max_audio_decoded_bytes=8000))
    with pytest.raises(MediaTooLarge):
        decode(encoded(kind), MediaConfig(max_audio_bytes=1000, max_video_bytes=1000))


def claiming_a_millisecond(kind):
    """A file whose header says so."""
    data = bytearray(encoded(kind))
    if kind == "m4a":
        at = data.index(b"mdhd") + 16
        (ticks_per_s,) = struct.unpack_from(">I", data, at)
        struct.pack_into(">I", data, at + 4, ticks_per_s // 1000)
    else:
        struct.pack_into(">d", data, data.index(b"\x44\x89\x88") + 3, 1.0)
    return bytes(data)


@pytest.mark.parametrize("kind", ["m4a", "webm"])
def test_actual_length_is_checked_during_decoding(kind):
    data = claiming_a_millisecond(kind)
    assert decode(data).size.num_samples > 3000
    with pytest.raises(AudioTooLong, match="or has too many samples"):
        decode(data, MediaConfig(max_audio_duration_s=0.15))
    with pytest.raises(AudioTooLong, match="or has too many samples"):
        decode(data, MediaConfig(max_audio_decoded_bytes=8000))


@pytest.mark.parametrize("kind", FILES)
def test_channel_count_is_limited(kind):
    with pytest.raises(InvalidAudio):
        decode(encoded(kind), MediaConfig(max_audio_channels=1))


@pytest.mark.parametrize("channels", [9, 64])
def test_too_many_channels_are_invalid(channels):
    with pytest.raises(InvalidAudio):
        decode(by_libsndfile(tones(8000, channels), 8000))


def test_eight_planar_channels_are_rejected_where_pyav_would_crash():
    with pytest.raises(InvalidAudio, match="8 channels"):
        decode(by_ffmpeg(tones(48000, 8), 48000, "ipod", "aac"))


def test_video_without_audio_is_invalid():
    out = BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=10, width=64, height=48, pix_fmt="yuv420p")
        file.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8))))
        file.mux(stream.encode(None))
    with pytest.raises(InvalidAudio, match="no audio track"):
        decode(out.getvalue())


def test_non_seekable_wav_is_decoded():
    """vLLM rejects it, for that reason only."""
    assert decode(by_libsndfile(tones(8000), 8000, "WAV", "GSM610")).size.num_samples >= 1600


def test_unsupported_codec_is_rejected():
    with pytest.raises(UnsupportedMediaType, match="codec is not supported"):
        decode(by_ffmpeg(tones(16000), 16000, "matroska", "tta"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_samples_are_invalid(value):
    samples = tones(8000, 2)
    samples[77, 1] = value
    with pytest.raises(InvalidAudio, match="not finite"):
        decode(by_libsndfile(samples, 8000, "WAV", "FLOAT"))


def test_overflowing_channel_sum_is_accepted():
    loud = np.full(1000, 3e38, np.float32)
    assert decode(by_libsndfile(loud, 8000, "WAV", "FLOAT")).samples[0] == np.float32(3e38)


def test_overflowing_channel_mean_is_invalid():
    with pytest.raises(InvalidAudio, match="not finite"):
        decode(by_libsndfile(np.full((1000, 2), 3e38, np.float32), 8000, "WAV", "FLOAT"))


@pytest.mark.parametrize("names", [("WAV", None), ("FLAC", None), ("OGG", "VORBIS")])
def test_audio_without_samples_is_invalid(names):
    with pytest.raises((InvalidAudio, EmptyMedia)):  # nothing at all is written of an Ogg
        decode(by_libsndfile(np.zeros((0, 2), np.float32), 8000, *names))


def test_empty_input_is_empty_media():
    with pytest.raises(EmptyMedia):
        decode(b"")


def test_text_is_unsupported():
    with pytest.raises(UnsupportedMediaType):
        decode(b"this is named speech.wav")


@pytest.mark.parametrize("claimed", [2**32 - 1, 2**31, 10**7])
def test_wav_claiming_too_many_samples_gives_the_existing_ones(claimed):
    data = bytearray(encoded("wav"))
    data[40:44] = struct.pack("<I", claimed)
    assert decode(bytes(data)).size.num_samples == 1600


@pytest.mark.parametrize("kind", FILES)
def test_truncated_audio_is_shorter_or_invalid(kind):
    whole = decode(encoded(kind)).size.num_samples
    data = encoded(kind)
    for part in (0.2, 0.5, 0.9):
        try:
            decoded = decode(data[: int(len(data) * part)])
        except (InvalidAudio, UnsupportedMediaType):  # an MP4 may lose the description of its audio codec
            continue
        assert 0 < decoded.size.num_samples <= whole


def frugally(data: bytes, config: MediaConfig, raises: type[MedialaneError]) -> None:
    """What numpy allocates is seen by tracemalloc, and is what a claimed length would make large."""
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(raises):
            decode(data, config)
        assert time.process_time() - start < 3
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("container", "coding"), [("ogg", "libopus"), ("matroska", "libopus"), ("ipod", "aac")])
def test_hours_of_silence_in_a_small_file_exceed_the_limit(container, coding):
    """Half an hour stands for a day: what decides is the first limit that is passed."""
    data = hours_of_silence(container, coding, 48000, 1800)
    assert len(data) < 2 * MIB
    frugally(data, MediaConfig(max_audio_decoded_bytes=32 * MIB), AudioTooLong)


@pytest.mark.parametrize("nbytes", [10, 100, 100_000])
def test_id3_tag_claiming_a_quarter_of_a_gigabyte(nbytes):
    data = b"ID3\x04\0\0\x7f\x7f\x7f\x7f" + bytes(nbytes)
    frugally(data, CONFIG, InvalidAudio)


def test_flac_claiming_maximal_length_allocates_within_the_limit():
    data = bytearray(encoded("flac"))
    bits = int.from_bytes(data[18:26], "big")
    data[18:26] = (bits >> 36 << 36 | (1 << 36) - 1).to_bytes(8, "big")
    frugally(bytes(data), CONFIG, AudioTooLong)


@pytest.mark.parametrize("library", ["av", "soundfile"])
def test_missing_library_rejects_audio_by_name(library):
    """Blocked as an installation without it is: the import raises ModuleNotFoundError."""
    program = f"""
import sys
sys.modules["{library}"] = None
from medialane.media import MediaConfig, decode
data = memoryview(sys.stdin.buffer.read())
decode(data, "audio", media_type="audio/mp4", io=b"{{}}", config=MediaConfig(), sampler=None)
"""
    done = subprocess.run([sys.executable, "-c", program], input=encoded("m4a"), capture_output=True, check=False)
    assert re.search(rb"UnsupportedMediaType: .*server does not support .*audio", done.stderr), done.stderr


def test_messages_contain_no_library_text():
    for kind in ("m4a", "webm"):
        with pytest.raises(InvalidAudio) as raised:
            decode(encoded(kind)[:200])
        assert raised.value.message == "the audio is damaged and cannot be decoded"


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(FILES)),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=12),
    st.floats(0.05, 1),
)
def test_mutated_audio_decodes_or_raises_our_error(kind, changes, part):
    data = bytearray(encoded(kind))
    for place, value in changes:
        data[int(place**3 * len(data))] = value  # headers are at the front
    try:
        decoded = decode(bytes(data[: int(len(data) * part)]))
    except MedialaneError:
        return
    assert np.isfinite(decoded.samples).all()
    assert 0 < decoded.size.num_samples <= CONFIG.max_audio_duration_s * decoded.sample_rate
