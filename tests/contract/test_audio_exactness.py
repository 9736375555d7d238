"""Decoded samples equal vLLM's byte for byte, and damaged files are accepted or rejected as by vLLM."""

import logging
import warnings
from io import BytesIO
from itertools import product

import numpy as np
import pytest

from audio_maker import FILES, by_ffmpeg, by_libsndfile, tones
from decoded_media import decode_audio
from medialane.media import MediaConfig
from medialane.types.errors import MedialaneError

#: The first test imports vLLM, which is slow on a busy machine.
pytestmark = pytest.mark.timeout(120)

CONFIG = MediaConfig()
RATES = [8000, 16000, 22050, 44100, 48000]
CHANNELS = [1, 2, 6]
OPUS_RATES = [8000, 16000, 48000]


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    """vLLM warns for each clip that torchcodec is missing."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def by_vllm(data: bytes) -> tuple[np.ndarray, float]:
    from vllm.multimodal.media.audio import AudioMediaIO

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's about odd floats
        return AudioMediaIO().load_bytes(data)


def assert_exact(data: bytes) -> None:
    expected, rate = by_vllm(data)
    decoded = decode_audio(memoryview(data), CONFIG)
    assert decoded.sample_rate == rate
    assert expected.dtype == np.float32
    assert len(expected) > 0
    assert decoded.samples.tobytes() == expected.tobytes()


def assert_resampled_exactly(data: bytes, rate: int) -> None:
    from vllm.multimodal.media.audio import load_audio

    expected, _ = load_audio(BytesIO(data), sr=rate)
    decoded = decode_audio(memoryview(data), CONFIG, sample_rate=rate)
    assert decoded.sample_rate == rate
    assert len(expected) > 0
    assert decoded.samples.tobytes() == expected.tobytes()


@pytest.mark.parametrize("rate", [8000, 16000, 24000])
@pytest.mark.parametrize("name", FILES)
def test_resampled_upload_matches_vllm(name, rate):
    """As vLLM decodes uploads for transcription."""
    assert_resampled_exactly(FILES[name](), rate)


@pytest.mark.parametrize("seconds", [0.001, 0.05, 3])
def test_resampled_clip_of_any_length_matches_vllm(seconds):
    assert_resampled_exactly(by_libsndfile(tones(44100, 2, seconds), 44100), 16000)
    if seconds > 1:
        assert_resampled_exactly(by_ffmpeg(tones(44100, 6, seconds), 44100, "ipod", "aac"), 16000)


def test_torchcodec_is_absent():
    """With torchcodec, which needs a system FFmpeg, vLLM decodes differently and its values are not ours."""
    from vllm.multimodal.media.audio import load_audio_torchcodec

    with pytest.raises(ImportError):
        load_audio_torchcodec(BytesIO(by_libsndfile(tones(8000), 8000)))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("channels", [*CHANNELS, 3, 7, 8])
@pytest.mark.parametrize("coding", ["PCM_16", "PCM_24", "PCM_U8", "FLOAT", "DOUBLE", "ULAW"])
def test_wav_matches_vllm(coding, channels, rate):
    assert_exact(by_libsndfile(tones(rate, channels), rate, "WAV", coding))


@pytest.mark.parametrize("coding", ["IMA_ADPCM", "MS_ADPCM"])
def test_compressed_wav_matches_vllm(coding):
    assert_exact(by_libsndfile(tones(8000), 8000, "WAV", coding))


@pytest.mark.parametrize(
    ("container", "coding", "rate", "channels"),
    [
        *product(["FLAC"], [None], RATES, CHANNELS),
        *product(["MP3"], [None], RATES, [1, 2]),
        *product(["OGG"], ["VORBIS"], RATES, CHANNELS),
        *product(["OGG"], ["OPUS"], OPUS_RATES, CHANNELS),
    ],
)
def test_compressed_audio_matches_vllm(container, coding, rate, channels):
    assert_exact(by_libsndfile(tones(rate, channels), rate, container, coding))


@pytest.mark.parametrize(
    ("container", "coding", "video", "rate", "channels"),
    [
        *product(["ipod"], ["aac"], [None], RATES, CHANNELS),
        *product(["mp4"], ["aac"], ["mpeg4"], RATES, CHANNELS),
        *product(["mov", "matroska"], ["aac"], ["libx264"], [44100], CHANNELS),
        *product(["adts"], ["aac"], [None], RATES, CHANNELS),
        *product(["webm"], ["libopus"], [None, "libvpx"], OPUS_RATES, CHANNELS),
        *product(["matroska"], ["flac"], [None], RATES, CHANNELS),
        # vLLM treats packed samples as one channel and does not scale them.
        *product(["mov"], ["pcm_s16le"], [None], [8000], CHANNELS),
    ],
)
def test_ffmpeg_only_formats_match_vllm(container, coding, video, rate, channels):
    assert_exact(by_ffmpeg(tones(rate, channels), rate, container, coding, video))


def test_signed_zero_is_preserved():
    assert_exact(by_libsndfile(np.full((100, 2), -0.0, np.float32), 8000, "WAV", "FLOAT"))


def test_long_audio_matches_vllm():
    assert_exact(by_libsndfile(tones(44100, 2, 20), 44100, "MP3"))


def test_wav_with_streaming_header_sizes_matches_vllm():
    data = bytearray(by_libsndfile(tones(8000), 8000))
    data[4:8] = data[40:44] = b"\xff" * 4
    assert_exact(bytes(data))


@pytest.mark.parametrize("kind", FILES)
def test_damaged_audio_decodes_as_in_vllm_or_is_rejected(kind):
    """We may reject what vLLM accepts (no samples, non-finite samples), but never return other samples."""
    rng = np.random.default_rng(7)
    whole = FILES[kind]()
    for attempt in range(12):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), 3):
            data[at] = rng.integers(0, 256)
        if attempt % 3 == 0:
            del data[rng.integers(len(data) // 4, len(data)) :]
        try:
            decoded = decode_audio(memoryview(bytes(data)), CONFIG)
        except MedialaneError:
            continue
        try:
            expected, rate = by_vllm(bytes(data))
        except UnicodeDecodeError:  # vLLM rejects audio whose tags are not UTF-8
            continue
        assert decoded.sample_rate == rate
        assert decoded.samples.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("part", [0.3, 0.5, 0.9])
def test_truncated_audio_is_accepted_or_rejected_as_in_vllm(kind, part):
    whole = FILES[kind]()
    data = whole[: int(len(whole) * part)]
    try:
        expected, _ = by_vllm(data)
    except (ValueError, RuntimeError, AttributeError):  # the last codec has no decoder
        expected = np.empty(0, np.float32)
    try:
        samples = decode_audio(memoryview(data), CONFIG).samples
    except MedialaneError:
        samples = np.empty(0, np.float32)
    assert samples.tobytes() == expected.tobytes()
