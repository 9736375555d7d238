"""Decodes audio to mono samples with exactly the values of vLLM's own chain.

vLLM tries libsndfile (soundfile) first and falls back to FFmpeg (PyAV), keeps the sample rate and takes the mean over
the channels (`vllm/multimodal/media/audio.py`; its first choice, torchcodec, needs a system FFmpeg and gives other
values). We make the same calls, except that the mean is computed differently, that FFmpeg may only use the demuxer of
the detected container, and that limits apply. `tests/contract/test_audio_exactness.py` compares arrays.

Runs inside a preparer: synchronously, in one thread, on untrusted bytes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from medialane.media.config import MediaConfig
from medialane.media.container import AudioType, MemoryFile, check_references, sniff_audio
from medialane.types.errors import AudioTooLong, InvalidAudio, UnsupportedMediaType
from medialane.types.media import AudioSamples, MediaSize

# Both are optional: images need neither. Imported here, before preparers are forked, so that all share their pages.
try:
    import av
except ImportError:
    av = None  # type: ignore[assignment]
try:
    import soundfile
except (ImportError, OSError):  # OSError: soundfile without libsndfile
    soundfile = None

_UNDECODABLE = "the audio is damaged and cannot be decoded"

#: libsndfile's errors after which FFmpeg is tried: garbled, unrecognised, malformed, unsupported. As vLLM's
#: `_BAD_SF_CODES`; every other error is final there and here.
_TRY_FFMPEG = {0, 1, 3, 4}

#: FFmpeg's demuxers allowed for each type. ID3 tags also precede AAC and FLAC.
_CONTAINERS: dict[AudioType, str] = {
    "audio/wav": "wav",
    "audio/flac": "flac",
    "audio/mpeg": "mp3,aac,flac",
    "audio/aac": "aac,mp3",
    "audio/ogg": "ogg",
    "audio/mp4": "mov",
    "video/mp4": "mov",
    "video/webm": "matroska",
    "video/x-matroska": "matroska",
}

#: Audio codecs found in real files of these types. The list also keeps FFmpeg from opening video decoders when it
#: probes streams.
_CODECS = (
    "aac", "aac_latm", "mp3float", "mp3", "mp2float", "mp2", "flac", "alac", "vorbis", "libvorbis", "opus",
    "libopus", "speex", "libspeex", "ac3", "eac3", "amrnb", "amrwb", "adpcm_ima_wav", "adpcm_ms", "gsm_ms",
    "pcm_u8", "pcm_s8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be", "pcm_f32le",
    "pcm_f32be", "pcm_f64le", "pcm_f64be", "pcm_alaw", "pcm_mulaw",
)  # fmt: skip

#: Encodings of WAV with samples of equal size, always finite: libsndfile counts the samples in the file.
_SIZED_ENCODINGS = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "ULAW", "ALAW")

#: From this many terms, numpy sums a row pairwise instead of sequentially (`pairwise_sum`), which rounds differently.
_PAIRWISE_TERMS = 8

#: SF_COUNT_MAX of sndfile.h: of a file that is cut off.
_UNKNOWN_LENGTH = 2**63 - 1
#: Rates outside this range are errors: telephony has 8 kHz, studio recordings 192 kHz. vLLM accepts any.
_MIN_RATE_HZ = 1_000
_MAX_RATE_HZ = 768_000

#: PyAV 18.1 searches for the end of a frame's planes beyond its array of eight and dereferences an invalid pointer:
#: the process crashes (vLLM's does with a small 7.1 AAC file).
_TOO_MANY_PLANES = 8

_READ_BYTES = 1 << 16

#: Fewer samples are padded, as by vLLM: libswresample might return none for them.
_MIN_RESAMPLED = 1024

_Floats = NDArray[np.float32]


def decode_audio(data: memoryview, config: MediaConfig, *, sample_rate: int = 0) -> AudioSamples:
    """Decode one audio item to mono, at `sample_rate` or its own rate. `data` is not copied as a whole, nor needed
    afterwards.

    Raises InvalidAudio, AudioTooLong, and what `sniff_audio` raises.
    """
    media_type = _type_of(data, config)
    with np.errstate(all="ignore"):  # hostile floats; samples that are not finite are rejected below
        audio = _by_libsndfile(data, config)
        audio = _by_ffmpeg(data, media_type, config, sample_rate) if audio is None else _resampled(audio, sample_rate)
        _check_samples(audio.samples)
    return audio


def measure_audio(data: memoryview, config: MediaConfig, *, sample_rate: int = 0) -> MediaSize:
    """Return the size that `decode_audio` gives, and raise what it raises. Only the header of a WAV file is read; the
    number of samples in compressed audio is certain once it is decoded."""
    media_type = _type_of(data, config)
    if media_type == "audio/wav":
        with _libsndfile_errors(), _opened_by_libsndfile(data, config) as file:
            if file.frames > 0 and file.subtype in _SIZED_ENCODINGS and sample_rate in (0, file.samplerate):
                return MediaSize(num_samples=file.frames, sample_rate=file.samplerate)
    return decode_audio(data, config, sample_rate=sample_rate).size


def check_audio(data: memoryview, config: MediaConfig) -> None:
    """Raise what `decode_audio` raises for the file's header.

    The file is opened, and decoded only as far as FFmpeg needs to find its streams.
    """
    media_type = _type_of(data, config)
    with _libsndfile_errors(), _opened_by_libsndfile(data, config):
        return
    with _opened_by_ffmpeg(data, media_type, config):
        pass


def _type_of(data: memoryview, config: MediaConfig) -> AudioType:
    media_type = sniff_audio(data, config)
    if soundfile is None:
        raise UnsupportedMediaType("this server does not support audio")
    if media_type in ("audio/mp4", "video/mp4"):
        check_references(data)
    return media_type


def _check_header(*, num_samples: float, sample_rate: int, num_channels: int, config: MediaConfig) -> None:
    """Raise AudioTooLong or InvalidAudio unless audio with these properties may be decoded."""
    if not _MIN_RATE_HZ <= sample_rate <= _MAX_RATE_HZ:
        raise InvalidAudio(f"the audio has a sample rate of {sample_rate} Hz")
    if not 0 < num_channels <= config.max_audio_channels:
        raise InvalidAudio(f"the audio has {num_channels} channels; supported are 1 to {config.max_audio_channels}")
    if num_samples >= _UNKNOWN_LENGTH:
        raise InvalidAudio("the audio is incomplete: its length cannot be found")
    if num_samples > config.max_audio_duration_s * sample_rate:
        raise AudioTooLong(f"the audio is longer than {config.max_audio_duration_s:g} s")
    if num_samples * num_channels * 4 > config.max_audio_decoded_bytes:  # float32
        raise AudioTooLong(f"the audio samples take more than {config.max_audio_decoded_bytes} bytes")


def _check_planes(num_channels: int) -> None:
    """Raise InvalidAudio if a planar format has more channels than PyAV can handle."""
    if num_channels >= _TOO_MANY_PLANES:
        raise InvalidAudio(f"the audio has {num_channels} channels, more than this format supports")


def _check_samples(samples: _Floats) -> None:
    if not samples.size:
        raise InvalidAudio("the audio has no samples")
    if not (np.isfinite(samples.sum()) or np.isfinite(samples).all()):  # the sum is cheaper
        raise InvalidAudio("the audio has samples that are not finite")


def _by_libsndfile(data: memoryview, config: MediaConfig) -> AudioSamples | None:
    """Decode with libsndfile; None if FFmpeg has to.

    One read, like vLLM: libsndfile never returns more frames than it reported on opening.
    """
    with _libsndfile_errors(), _opened_by_libsndfile(data, config) as file:
        # vLLM omits the number of frames, which fails for encodings that soundfile cannot seek in (GSM).
        interleaved: _Floats = file.read(max(file.frames, 0), dtype="float32", always_2d=True)
        return AudioSamples(_mean_of_interleaved(interleaved), file.samplerate)
    return None


@contextmanager
def _libsndfile_errors() -> Iterator[None]:
    """Raise InvalidAudio for libsndfile's errors; suppress errors after which FFmpeg is tried."""
    try:
        yield
    except soundfile.LibsndfileError as error:
        if error.code not in _TRY_FFMPEG:
            raise InvalidAudio(_UNDECODABLE) from error


@contextmanager
def _opened_by_libsndfile(data: memoryview, config: MediaConfig) -> Iterator[soundfile.SoundFile]:
    """Open a file and check its header against the limits."""
    with soundfile.SoundFile(_file(data)) as file:
        _check_header(num_samples=file.frames, sample_rate=file.samplerate, num_channels=file.channels, config=config)
        yield file


def _mean_of_interleaved(samples: _Floats) -> _Floats:
    """Return exactly `np.mean(samples.T, axis=0)`, which sums sample by sample and takes longer than decoding."""
    num_channels = samples.shape[1]
    if num_channels == 1:
        return samples[:, 0]
    mean: _Floats
    if num_channels >= _PAIRWISE_TERMS:
        mean = np.mean(samples.T, axis=0)
        return mean
    mean = np.zeros(len(samples), np.float32)  # numpy's sum starts from zero too, which matters for -0.0
    for channel in range(num_channels):
        mean += samples[:, channel]
    mean /= np.float32(num_channels)
    return mean


def _resampled(audio: AudioSamples, sample_rate: int) -> AudioSamples:
    """Return the audio at another rate, by the calls of vLLM's `resample_audio_pyav`."""
    samples, rate = audio.samples, audio.sample_rate
    if sample_rate in (0, rate) or not samples.size:
        return audio
    if av is None:
        raise UnsupportedMediaType("this server does not support audio of this sample rate")
    num_samples = math.ceil(samples.size * sample_rate / rate)
    padded = np.pad(samples, (0, max(0, _MIN_RESAMPLED - samples.size)))
    frame = av.AudioFrame.from_ndarray(padded.reshape(1, -1), format="fltp", layout="mono")
    frame.sample_rate = rate
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=sample_rate)
    with _ffmpeg_errors():
        frames = [*resampler.resample(frame), *resampler.resample(None)]
    resampled = np.concatenate([frame.to_ndarray() for frame in frames], axis=1)[0]
    return AudioSamples(resampled[:num_samples], sample_rate)


# FFmpeg


def _by_ffmpeg(data: memoryview, media_type: AudioType, config: MediaConfig, sample_rate: int) -> AudioSamples:
    with _opened_by_ffmpeg(data, media_type, config) as (container, stream):
        frames, rate = container.decode(stream), sample_rate or stream.rate
        if rate != stream.rate:
            frames = _resampled_frames(frames, rate)
        return AudioSamples(_gather(frames, rate, config), rate)


def _resampled_frames(frames: Iterator[av.AudioFrame], sample_rate: int) -> Iterator[av.AudioFrame]:
    """Resample to mono as vLLM does, which mixes channels here, and drops what the resampler has buffered at the
    end."""
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=sample_rate)
    for frame in frames:
        yield from resampler.resample(frame)


@contextmanager
def _opened_by_ffmpeg(
    data: memoryview, media_type: AudioType, config: MediaConfig
) -> Iterator[tuple[av.container.InputContainer, av.AudioStream]]:
    """Open a file and check its first audio stream against the limits; yield both."""
    if av is None:
        raise UnsupportedMediaType("this server does not support this kind of audio")
    with _ffmpeg_errors(), _open(data, media_type) as container:
        if not container.streams.audio:
            raise InvalidAudio("the media has no audio track")
        stream = container.streams.audio[0]
        context = stream.codec_context
        if context is None:
            raise InvalidAudio(_UNDECODABLE)
        if context.name not in _CODECS:
            raise UnsupportedMediaType("the audio codec is not supported by this server")
        for other in container.streams:
            if other.index != stream.index:
                other.discard = av.stream.Discard.all
        context.thread_count = 1
        num_samples = _claimed_seconds(container, stream) * stream.rate
        _check_header(num_samples=num_samples, sample_rate=stream.rate, num_channels=stream.channels, config=config)
        if context.format is not None and context.format.is_planar:
            _check_planes(stream.channels)
        yield container, stream


@contextmanager
def _ffmpeg_errors() -> Iterator[None]:
    """Convert FFmpeg's errors, and PyAV's ValueError and OverflowError for values from the file, to InvalidAudio."""
    try:
        yield
    except (av.error.FFmpegError, ValueError, OverflowError) as error:
        raise InvalidAudio(_UNDECODABLE) from error


def _open(data: memoryview, media_type: AudioType) -> av.container.InputContainer:
    return av.open(
        _file(data),
        mode="r",
        container_options={
            "format_whitelist": _CONTAINERS[media_type],
            "codec_whitelist": ",".join(_CODECS),
            "protocol_whitelist": "none",
        },
        metadata_errors="ignore",  # tags of old files are in any encoding
    )


def _claimed_seconds(container: av.container.InputContainer, stream: av.AudioStream) -> float:
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    return (container.duration or 0) / av.time_base


def _gather(frames: Iterator[av.AudioFrame], rate: int, config: MediaConfig) -> _Floats:
    """Return the mean over the channels of all frames. Like vLLM, treats packed frames as mono."""
    max_samples = min(int(rate * config.max_audio_duration_s), config.max_audio_decoded_bytes // 4)
    gathered = np.empty(max_samples, np.float32)  # untouched pages use no memory
    num_samples, num_bytes, num_rows = 0, 0, 0
    for frame in frames:
        if frame.format.is_planar:
            _check_planes(frame.layout.nb_channels)
        rows = frame.to_ndarray().astype(np.float32, copy=False)
        num_rows = num_rows or len(rows)
        if len(rows) != num_rows:
            raise InvalidAudio("the number of audio channels changes")
        num_bytes += rows.nbytes
        end = num_samples + rows.shape[1]
        if end > max_samples or num_bytes > config.max_audio_decoded_bytes:
            raise AudioTooLong(f"the audio is longer than {config.max_audio_duration_s:g} s, or has too many samples")
        gathered[num_samples:end] = np.mean(rows, axis=0)
        num_samples = end
    return gathered[:num_samples]


def _file(data: memoryview) -> io.BufferedReader:
    """Return a file over `data` without copying it. Libraries read a few hundred bytes at a time: buffered, in C."""
    return io.BufferedReader(MemoryFile(data), _READ_BYTES)
