"""Hostile audio: all marked `+`, since the table has none. Their decoder's own cases are in `tests/unit/media`."""

from __future__ import annotations

import base64
import struct
from functools import cache

import media_files as m
import numpy as np
from corpus import Row, at, chat, sent
from video_rows import NO_FILES, PLAYLISTS, playlist

from audio_maker import by_ffmpeg, by_libsndfile, hours_of_silence, tones
from video_clips import clip


@cache
def _m4a(channels: int = 2) -> bytes:
    return by_ffmpeg(tones(48000, channels), 48000, "ipod", "aac")


@cache
def _opus() -> bytes:
    return by_libsndfile(tones(16000, 2), 16000, "OGG", "OPUS")


def _wav(*, channels: int = 1, rate: int = 8000, coding: int = 1, num_bytes: int = 1000, before: bytes = b"") -> bytes:
    layout = struct.pack("<HHIIHH", coding, channels, rate, rate & 0xFFFF, max(1, 2 * channels) & 0xFFFF, 16)
    parts = b"WAVE" + before + struct.pack("<4sI", b"fmt ", 16) + layout
    parts += struct.pack("<4sI", b"data", num_bytes) + bytes(num_bytes)
    return b"RIFF" + struct.pack("<I", len(parts)) + parts


def _loud(value: float) -> bytes:
    samples = tones(8000, 2)
    samples[77, 1] = value
    return by_libsndfile(samples, 8000, "WAV", "FLOAT")


def _flac_claiming(num_samples: int) -> bytes:
    data = bytearray(by_libsndfile(tones(8000, 2), 8000, "FLAC"))
    bits = int.from_bytes(data[18:26], "big")
    data[18:26] = (bits >> 36 << 36 | num_samples).to_bytes(8, "big")
    return bytes(data)


def _m4a_claiming_samples() -> bytes:
    """`stsz` claims 2^28 samples."""
    data = _m4a()
    place = data.index(b"stsz") + 12
    return data[:place] + struct.pack(">I", 1 << 28) + data[place + 4 :]


def _m4a_referring() -> bytes:
    """`dref` names another file: the self-contained flag is cleared."""
    data = _m4a()
    place = data.index(b"url ", data.index(b"dref"))
    return data[: place + 4] + bytes(4) + data[place + 8 :]


_INVALID = {
    "+ WAV of 9 channels": lambda: _wav(channels=9),
    "+ WAV of 65 535 channels": lambda: _wav(channels=65_535),
    "+ WAV without channels": lambda: _wav(channels=0),
    "+ WAV at 0 Hz": lambda: _wav(rate=0),
    "+ WAV at 4 GHz": lambda: _wav(rate=(1 << 32) - 1),
    "+ WAV of 100 000 parts": lambda: _wav(before=(b"junk" + bytes(4)) * 100_000),
    "+ WAV without its description": lambda: b"RIFF\x10\0\0\0WAVEdata\4\0\0\0\0\0\0\0",
    "+ WAV without samples": lambda: _wav(num_bytes=0),
    "+ WAV of an unknown coding": lambda: _wav(coding=0x7777),
    "+ WAV with a number that is none": lambda: _loud(float("nan")),
    "+ WAV of infinite loudness": lambda: _loud(float("inf")),
    "+ WAV whose mean overflows": lambda: by_libsndfile(np.full((900, 2), 3e38, np.float32), 8000, "WAV", "FLOAT"),
    "+ FLAC without its description": lambda: b"fLaC\x84\0\0\4" + bytes(500),
    "+ ID3 tag of a quarter of a gigabyte": lambda: b"ID3\4\0\0\x7f\x7f\x7f\x7f" + bytes(100_000),
    "+ MP3 of noise": lambda: b"\xff\xfb\x90\x64" + np.random.default_rng(0).bytes(50_000),
    "+ Ogg of noise": lambda: b"OggS\0\2" + np.random.default_rng(0).bytes(50_000),
    "+ Ogg cut in its header": lambda: _opus()[:60],
    "+ M4A of eight channels, which PyAV crashes of": lambda: _m4a(8),
    "+ M4A without its index": lambda: _m4a()[: _m4a().index(b"moov") - 4],
    "+ M4A without its data": lambda: m.box(b"ftyp", b"M4A \0\0\0\0") + _m4a()[_m4a().index(b"moov") - 4 :],
    "+ M4A of 2^28 samples": _m4a_claiming_samples,
    "+ M4A of boxes": lambda: m.box(b"ftyp", b"M4A \0\0\0\0") + m.box(b"free") * 1_000_000,
    "+ video without audio": lambda: clip(4),
    "+ WebM of noise": lambda: (
        clip(2, codec="libvpx-vp9", container="webm")[:80] + np.random.default_rng(0).bytes(9000)
    ),
}

#: Half an hour stands for a day: limits are of seconds and of bytes of samples, and the first that is passed decides.
_TOO_LONG = {
    "+ WAV of 11 minutes": lambda: by_libsndfile(np.zeros(8000 * 660, np.float32), 8000, "WAV", "PCM_U8"),
    "+ FLAC that claims 2^36 samples": lambda: _flac_claiming((1 << 36) - 1),
    "+ Ogg of half an hour of silence": lambda: hours_of_silence("ogg", "libopus", 48000, 1800),
    "+ M4A of half an hour of silence": lambda: hours_of_silence("ipod", "aac", 48000, 1800),
    "+ Matroska of half an hour of silence": lambda: hours_of_silence("matroska", "libopus", 48000, 1800),
}

_UNSUPPORTED = {
    "+ image as audio": lambda: m.picture(81),
    "+ AIFF": lambda: b"FORM\0\0\0\0AIFFCOMM" + bytes(100),
    "+ AVI as audio": lambda: b"RIFF\x24\0\0\0AVI LIST" + bytes(100),
    "+ M4A that refers to a file": _m4a_referring,
}

_GOOD = {
    "+ good WAV": lambda: by_libsndfile(tones(16000, 2), 16000),
    "+ good MP3": lambda: by_libsndfile(tones(16000, 2), 16000, "MP3"),
    "+ good Opus": _opus,
    "+ good M4A": _m4a,
    "+ WAV of eight channels": lambda: by_libsndfile(tones(16000, 8), 16000),
    "+ WAV that claims 4 GB": lambda: _wav(num_bytes=4000)[:40] + b"\xff" * 4 + bytes(4000),
    "+ WAV after 300 parts": lambda: _wav(before=(b"junk" + bytes(4)) * 300, num_bytes=4000),
    "+ audio of a video": lambda: by_ffmpeg(tones(16000, 2), 16000, "mp4", "aac", "mpeg4"),
}

_URLS = {
    "+ audio of the canary's": ("http://127.0.0.1:{canary}/a.wav", 400, "media_url_forbidden"),
    "+ audio of an inner name": ("http://inside.test:{canary}/a.wav", 400, "media_url_forbidden"),
    "+ audio by another scheme": ("rtsp://127.0.0.1:{canary}/a.wav", 400, "unsupported_url_scheme"),
    "+ audio of a secret": ("file://{folder}/secret.jpg", 400, "media_url_forbidden"),
    "+ audio without base64": ("data:audio/wav,abcd", 400, "invalid_data_url"),
    "+ audio with bad base64": ("data:audio/wav;base64,AA*A", 400, "invalid_base64"),
    "+ audio of no bytes": ("data:audio/wav;base64,", 400, "empty_media"),
}


def _input_audio(data: str, said: str = "wav") -> dict[str, object]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": said}}


def _rows(found: dict, status: int, code: str | None, mib: float = 64.0) -> tuple[Row, ...]:
    return tuple(
        Row(name, sent(make, "audio_url", "audio/wav"), status, code, 5.0, mib) for name, make in found.items()
    )


AUDIO_ROWS = (
    *_rows(_INVALID, 400, "invalid_audio"),
    *_rows(_TOO_LONG, 413, "audio_too_long", 300.0),
    *_rows(_UNSUPPORTED, 415, "unsupported_media_type"),
    *_rows({"+ text as audio": lambda: b"this is named speech.wav"}, 400, "invalid_audio"),
    *_rows(_GOOD, 200, None, 128.0),
    *(
        Row(name.replace("61 ", "+ ") + " as audio", playlist(text, "audio_url"), status, code, 1.0)
        for texts, status, code in ((PLAYLISTS, 415, "unsupported_media_type"), (NO_FILES, 400, "invalid_audio"))
        for name, text in texts.items()
    ),
    *(Row(name, at(url, "audio_url"), status, code) for name, (url, status, code) in _URLS.items()),
    Row("+ input_audio with bad base64", lambda w: chat(w.model, _input_audio("AA*A")), 400, "invalid_base64"),
    Row(
        "+ input_audio of another format than it says",
        lambda w: chat(w.model, _input_audio(base64.b64encode(_opus()).decode(), "mp3")),
        200,
        mib=128.0,
    ),
)
