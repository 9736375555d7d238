"""Rows 58 to 61: videos. Their decoder's own cases are in `tests/unit/media/test_media_video.py`."""

from __future__ import annotations

import struct
from functools import cache

import media_files as m
from corpus import Body, Row, chat, data_url, media_part, sent

from audio_maker import by_ffmpeg, tones
from video_clips import clip, remux


@cache
def _clip() -> bytes:
    return clip(12)


def _claiming_samples() -> bytes:
    """`stsz` claims 2^28 samples."""
    data = _clip()
    at = data.index(b"stsz") + 12
    return data[:at] + struct.pack(">I", 1 << 28) + data[at + 4 :]


def _referring(url: bytes) -> bytes:
    """`dref` names another file: the self-contained flag is cleared."""
    data = _clip()
    at = data.index(b"url ", data.index(b"dref"))
    return data[: at + 4] + bytes(4) + data[at + 8 :].replace(b"Lavf", url[:4])


def _index_only() -> bytes:
    data = _clip()
    return data[: data.index(b"mdat") - 4]


def playlist(text: str, kind: str = "video_url") -> Body:
    """A text that makes a demuxer open URLs: the canary's."""
    return lambda world: chat(world.model, media_part(data_url(world.expand(text).encode(), "video/mp4"), kind))


PLAYLISTS = {
    "61 HLS": "#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nhttp://127.0.0.1:{canary}/a.ts\n#EXT-X-ENDLIST\n",
    "+ HLS of a file": "#EXTM3U\n#EXTINF:5,\nfile:///etc/passwd\n",
    "+ HLS with a byte order mark": "\ufeff#EXTM3U\n#EXTINF:5,\nhttp://127.0.0.1:{canary}/a.ts\n",
    "61 DASH": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>http://127.0.0.1:{canary}/'
    "</BaseURL></MPD>",
    "61 ffconcat": "ffconcat version 1.0\nfile http://127.0.0.1:{canary}/a.mp4\n",
    "61 SDP": "v=0\r\no=- 0 0 IN IP4 x\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=video {canary} RTP/AVP 96\r\n",
    "61 AVI with a playlist inside": "RIFF\x24\0\0\0AVI LIST\x10\0\0\0hdrlGAB2\0\2\0#EXTM3U\nhttp://127.0.0.1:{canary}/",
    "+ MPEG-TS": "G\x40\x11\x10" + "\0" * 184 + "G\x40\x11\x10",
}

#: No magic bytes of any kind of file.
NO_FILES = {
    "+ URL as a file": "http://127.0.0.1:{canary}/a.mp4",
    "+ subfile": "subfile,,start,0,end,9,,:http://127.0.0.1:{canary}/a.mp4",
    "+ image sequence": "/etc/%d.jpg",
}

_INVALID = {
    "60 all of it before zero": lambda: remux(clip(30), shift=-60),
    "60 no keyframe": lambda: remux(clip(30, gop=100), drop=1),
    "60 no keyframe, Matroska": lambda: remux(clip(30, gop=100), drop=1, container="matroska"),
    "60 no keyframe, VP9": lambda: remux(
        clip(30, gop=100, codec="libvpx-vp9", container="webm"), drop=1, container="webm"
    ),
    "60 audio alone": lambda: by_ffmpeg(tones(16000, 2), 16000, "mp4", "aac"),
    "60 audio alone, WebM": lambda: by_ffmpeg(tones(16000, 2), 16000, "webm", "libopus"),
    "58 MP4 of 2^28 samples": _claiming_samples,
    "58 MP4 without moov": lambda: m.box(b"ftyp", b"isom\0\0\0\0isommp42") + m.box(b"mdat", bytes(1000)),
    "58 truncated MP4": lambda: _clip()[:-300],
    "+ MP4 without its data": _index_only,
    "+ MP4 of boxes": lambda: m.box(b"ftyp", b"isom\0\0\0\0isom") + m.box(b"free") * 1_000_000,
    "+ MP4 in MP4 in MP4": lambda: m.box(b"ftyp", b"isom\0\0\0\0isom") + m.box(b"moov", _nested(200)),
    "+ WebM without measure": lambda: clip(2, codec="libvpx-vp9", container="webm")[:80],
}


def _nested(depth: int) -> bytes:
    data = b""
    for _ in range(depth):
        data = m.box(b"trak", data)
    return data


#: Accepted by vLLM, too: frames from zero on, by an edit list, and those before it in a file that has none.
_GOOD = {
    "60 begins before zero": lambda: remux(clip(30), shift=-25),
    "60 begins before zero, without an edit list": lambda: remux(clip(30), shift=-25, use_editlist="0"),
    "60 begins before zero, Matroska": lambda: remux(clip(30), shift=-5, container="matroska"),
    "+ good video": _clip,
}


VIDEO_ROWS = (
    *(Row(name, sent(make, "video_url", "video/mp4"), 400, "invalid_video", 4.0) for name, make in _INVALID.items()),
    Row(
        "59 24 hours",
        sent(lambda: clip(3, pts=[0, 1, 86_400], ticks=1, fps=1), "video_url", "video/mp4"),
        413,
        "video_too_long",
    ),
    *(Row(name, playlist(text), 415, "unsupported_media_type", 1.0) for name, text in PLAYLISTS.items()),
    *(Row(name, playlist(text), 400, "invalid_video", 1.0) for name, text in NO_FILES.items()),
    Row(
        "61 MOV that refers to a file",
        sent(lambda: _referring(b"file"), "video_url", "video/mp4"),
        415,
        "unsupported_media_type",
        1.0,
    ),
    Row("57 no video", lambda w: chat(w.model, media_part("data:video/mp4;base64,", "video_url")), 400, "empty_media"),
    Row("+ image as a video", sent(lambda: m.picture(80), "video_url"), 415, "unsupported_media_type"),
    *(Row(name, sent(make, "video_url", "video/mp4"), 200, None, 6.0, 300.0) for name, make in _GOOD.items()),
)
