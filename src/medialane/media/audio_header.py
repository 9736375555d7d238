"""What an encoded sound is, told from its first bytes, before any decoder sees it.

What a header says of rate, channels and length is held against the limits here; where it says nothing, or lies, the
decoder holds what it finds against the same ones. (In stage `url` vLLM decodes, with limits of its own.) The sound of a
video is taken too (`use_audio_in_video` sends the video itself), and may be as large as a video.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from medialane.core.errors import (
    AudioTooLong,
    EmptyMedia,
    InvalidAudio,
    InvalidVideo,
    MediaTooLarge,
    UnsupportedMediaType,
)
from medialane.media.config import MediaConfig
from medialane.media.matroska_header import matroska_tracks
from medialane.media.mp4_header import check_mp4, mp4_tracks
from medialane.media.track import Track

AudioType = Literal[
    "audio/wav",
    "audio/flac",
    "audio/mpeg",
    "audio/aac",
    "audio/ogg",
    "audio/mp4",
    "video/mp4",
    "video/webm",
    "video/x-matroska",
]

#: Rates outside are a mistake: a phone call has 8 kHz, a studio 192 kHz. vLLM takes any.
_MIN_RATE_HZ = 1_000
_MAX_RATE_HZ = 768_000

#: PyAV 18.1 looks for the end of a frame's planes behind its list of eight, and reads from an address that is none:
#: the process crashes (vLLM's does, by a small 7.1 AAC file).
_TOO_MANY_PLANES = 8

#: Chunks before a WAV file's samples; real files have some five.
_MAX_CHUNKS = 256
#: By the channel configuration of an AAC frame (ISO/IEC 13818-7, 6.3.4).
_AAC_CHANNELS = (0, 1, 2, 3, 4, 5, 6, 8)
#: Coding tags of a WAV file whose blocks have one size: PCM, float, A-law, u-law, extensible.
_FIXED_SIZE_CODINGS = {0x0001, 0x0003, 0x0006, 0x0007, 0xFFFE}

#: Kinds of ISO media file (ISO/IEC 14496-12): sound alone (phones write 3gp), and pictures, which are no sound.
_SOUND_BRANDS = (b"M4A ", b"M4B ", b"M4P ", b"3gp", b"3g2")
_PICTURE_BRANDS = (b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix", b"hevc", b"heim", b"heis")


def sniff_audio(data: bytes | bytearray | memoryview, config: MediaConfig) -> AudioType:
    """Tell the type of an encoded sound, which is within the limits as far as its header tells; reads headers only.

    Raises EmptyMedia, UnsupportedMediaType, MediaTooLarge, AudioTooLong, InvalidAudio (a header that ends early or that
    has a rate or channels which cannot be).
    """
    if not data:
        raise EmptyMedia("the media is empty")
    view = memoryview(data)
    media_type = _type_of(bytes(view[:64]))
    max_bytes = config.max_video_bytes if media_type.startswith("video/") else config.max_audio_bytes
    if len(data) > max_bytes:
        raise MediaTooLarge(f"the sound has {len(data)} bytes, more than {max_bytes}")
    if media_type == "audio/wav":
        _check_wav(view, config)
    elif media_type == "audio/flac":
        _check_flac(view, config)
    elif media_type == "audio/ogg":
        _check_channels(_ogg_channels(bytes(view[:512])), config)
    elif media_type == "audio/aac":
        _check_channels(_AAC_CHANNELS[(view[2] & 1) << 2 | view[3] >> 6], config, is_planar=True)
    elif media_type in ("audio/mp4", "video/mp4"):
        _check_track(_mp4_tracks(view), config)
    elif media_type in ("video/webm", "video/x-matroska"):
        _check_track(matroska_tracks(view), config)
    return media_type


def check_claim(*, num_samples: float, sample_rate: int, num_channels: int, config: MediaConfig) -> None:
    """Raise AudioTooLong or InvalidAudio unless a sound that is said to be so may be decoded."""
    if not _MIN_RATE_HZ <= sample_rate <= _MAX_RATE_HZ:
        raise InvalidAudio(f"the sound has a sample rate of {sample_rate} Hz")
    if not 0 < num_channels <= config.max_audio_channels:
        raise InvalidAudio(f"the sound has {num_channels} channels; there may be 1 to {config.max_audio_channels}")
    if num_samples > config.max_audio_duration_s * sample_rate:
        raise AudioTooLong(f"the sound is longer than {config.max_audio_duration_s:g} s")
    if num_samples * num_channels * 4 > config.max_audio_decoded_bytes:  # float32
        raise AudioTooLong(f"the sound's samples take more than {config.max_audio_decoded_bytes} bytes")


def check_planes(num_channels: int) -> None:
    """Raise InvalidAudio for sound whose decoder gives so many channels each by itself (planar)."""
    if num_channels >= _TOO_MANY_PLANES:
        raise InvalidAudio(f"the sound has {num_channels} channels, more than this kind of file may have")


def _type_of(head: bytes) -> AudioType:
    for is_type, media_type in _TYPES:
        if is_type(head):
            return media_type
    raise UnsupportedMediaType("the media is not a WAV, FLAC, MP3, AAC, Ogg, MP4, WebM or Matroska sound")


def _take(view: memoryview, offset: int, nbytes: int) -> bytes:
    part = bytes(view[offset : offset + nbytes])
    if len(part) < nbytes:
        raise InvalidAudio("the sound ends within its header")
    return part


# WAV (Multimedia Programming Interface and Data Specifications 1.0). Sizes may lie: recorders that stream write 0 or
# 2^32-1, and decoders read to the file's end. What a file holds is never more than its bytes.


def _check_wav(view: memoryview, config: MediaConfig) -> None:
    layout: bytes | None = None
    for kind, offset, nbytes in _chunks(view):
        if kind == b"fmt ":
            layout = _take(view, offset, 16)
        elif kind == b"data":
            if layout is None:
                raise InvalidAudio("the sound has no description in its header")
            _check_wav_layout(layout, min(nbytes, len(view) - offset), config)
            return


def _check_wav_layout(layout: bytes, nbytes: int, config: MediaConfig) -> None:
    coding, channels, block_bytes = (int.from_bytes(layout[at : at + 2], "little") for at in (0, 2, 12))
    known = coding in _FIXED_SIZE_CODINGS and block_bytes > 0
    check_claim(
        num_samples=nbytes / block_bytes if known else 0,
        sample_rate=int.from_bytes(layout[4:8], "little"),
        num_channels=channels,
        config=config,
    )


def _chunks(view: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """(kind, offset of its content, its size as declared) of the chunks of a WAV file."""
    offset = 12
    for _ in range(_MAX_CHUNKS):
        kind, nbytes = _take(view, offset, 4), int.from_bytes(_take(view, offset + 4, 4), "little")
        yield kind, offset + 8, nbytes
        offset += 8 + nbytes + nbytes % 2
    raise InvalidAudio("the sound has too many parts in its header")


# FLAC (RFC 9639, section 8.2): STREAMINFO is the first metadata block.


def _check_flac(view: memoryview, config: MediaConfig) -> None:
    if _take(view, 4, 4)[0] & 0x7F != 0:
        raise InvalidAudio("the sound has no description in its header")
    bits = int.from_bytes(_take(view, 18, 8), "big")
    check_claim(
        num_samples=bits & (1 << 36) - 1,
        sample_rate=bits >> 44,
        num_channels=(bits >> 41 & 7) + 1,
        config=config,
    )


# What containers say, zero being nothing


def _check_track(tracks: Iterator[Track], config: MediaConfig) -> None:
    """Look at the track that is decoded: the first one with sound."""
    track = next((track for track in tracks if track.kind == "audio"), None)
    if track is None:
        return
    if track.duration_s > config.max_audio_duration_s:
        raise AudioTooLong(f"the sound is longer than {config.max_audio_duration_s:g} s")
    _check_channels(track.num_channels, config, is_planar=not track.is_packed)


def _check_channels(num_channels: int, config: MediaConfig, *, is_planar: bool = False) -> None:
    if num_channels > config.max_audio_channels:
        raise InvalidAudio(f"the sound has {num_channels} channels; there may be 1 to {config.max_audio_channels}")
    if is_planar:
        check_planes(num_channels)


def _mp4_tracks(view: memoryview) -> Iterator[Track]:
    try:
        check_mp4(view)
    except InvalidVideo as error:
        raise InvalidAudio("the sound's file has no index that makes sense") from error
    return mp4_tracks(view)


def _ogg_channels(head: bytes) -> int:
    """By the first packet of the first stream, which is in a page of its own (RFC 3533, RFC 7845, Vorbis I)."""
    packet = head[27 + head[26] :] if len(head) > 26 else b""
    if packet.startswith(b"OpusHead"):
        return packet[9] if len(packet) > 9 else 0
    if packet.startswith(b"\x01vorbis"):
        return packet[11] if len(packet) > 11 else 0
    return 0


# What begins a file


def _is_frame(head: bytes, layers: tuple[int, ...]) -> bool:
    """An MPEG audio frame (ISO/IEC 11172-3, 2.4.1.3), of one of these layers, with a version, bit rate and rate."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return False
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    return version != 1 and layer in layers and head[2] >> 4 != 0xF and head[2] >> 2 & 3 != 3


def _is_adts(head: bytes) -> bool:
    """AAC (ISO/IEC 13818-7, 6.2): an MPEG frame's sync word, layer 0 and a sampling frequency that there is."""
    return len(head) >= 7 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0 and head[2] >> 2 & 0xF < 13


def _is_mp4(head: bytes) -> bool:
    return head[4:8] == b"ftyp" and not head[8:12].startswith(_PICTURE_BRANDS)


def _is_matroska(head: bytes, doctype: bytes) -> bool:
    return head.startswith(b"\x1a\x45\xdf\xa3") and doctype in head


#: Layer I is left out: nobody has it, and its sync word is also how UTF-16 text begins.
_TYPES: tuple[tuple[Callable[[bytes], bool], AudioType], ...] = (
    (lambda head: head.startswith(b"RIFF") and head[8:12] == b"WAVE", "audio/wav"),
    (lambda head: head.startswith(b"fLaC"), "audio/flac"),
    (lambda head: head.startswith(b"OggS\0"), "audio/ogg"),
    (lambda head: head.startswith(b"ID3") and len(head) >= 10, "audio/mpeg"),
    (lambda head: _is_frame(head, layers=(1, 2)), "audio/mpeg"),
    (_is_adts, "audio/aac"),
    (lambda head: _is_mp4(head) and head[8:12].startswith(_SOUND_BRANDS), "audio/mp4"),
    (_is_mp4, "video/mp4"),
    (lambda head: _is_matroska(head, b"webm"), "video/webm"),
    (lambda head: _is_matroska(head, b"matroska"), "video/x-matroska"),
)
