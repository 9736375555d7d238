"""Traffic to be replayed: the requests of a recording, or of an OpenAI batch file.

A line is a request: `custom_id`, `method`, `url` and `body` (https://platform.openai.com/docs/guides/batch; in vLLM's
`entrypoints/launchers/run_batch.py`, transcriptions have their file as `file_url`). Lines of a recording (`--record`)
have the member `medialane` as well (`gateway.records.recording`). Lines are read twice: once for times and names, and
again, one by one, when requests are made, so that no file has to fit into memory.

Media for stand-ins are made: photo-like images, videos and tones of the recorded sizes, the same for the same key.
Making an image takes dozens of milliseconds of a core that the compared servers need: it is made once, before the
first turn, and read from a file when it is sent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from pybase64 import b64encode

from medialane.gateway import RECORDING_FORMAT, MediaStandIn, parse_stand_in, with_media
from medialane.runtime.private_files import write_private
from medialane.testing.sample_media import sample_audio, sample_jpeg, sample_video
from medialane.types.errors import StartupFailed

_MOST_BAD_LINES: Final = 10
_MADE_UP: Final = (
    "media that were recorded by their hash are made up: of the same size, and equal where they were equal"
)


@dataclass(frozen=True, repr=False)
class Ask:
    """What is posted to `path`. The file of a form is its member `file_url`, a data: URL."""

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class TrafficRequest:
    """One request. `at_s` is when it is sent, in seconds since the first one, None if the file has no times. `make`
    may read files and generate media: not for the event loop. It raises UnusableLine."""

    id: str
    at_s: float | None
    make: Callable[[], Ask]


@dataclass(frozen=True)
class Traffic:
    """The requests of a file in the order of their times; `notes` say what of them is made up or left out."""

    format: str
    requests: tuple[TrafficRequest, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_timed(self) -> bool:
        return all(request.at_s is not None for request in self.requests)


class UnusableLine(Exception):
    """A line from which no request can be made; the message says which and why."""


class _Recorded(msgspec.Struct, frozen=True):
    at: float | None = None
    format: int = RECORDING_FORMAT


class _Head(msgspec.Struct, frozen=True):
    """What is read of a line at first: its body is large."""

    url: str
    body: msgspec.Raw
    custom_id: str = ""
    medialane: _Recorded | None = None


class _Whole(msgspec.Struct, frozen=True):
    url: str
    body: dict[str, Any]


def read_traffic(path: Path, *, media: Path, limit: int | None = None) -> Traffic:
    """Read the first `limit` requests, sorted by their times. Media that are made up are kept in the folder `media`.
    Raises StartupFailed if it is no such file."""
    try:
        found, bad = _read(path, StandIns(media), limit)
    except OSError as error:
        raise StartupFailed(f"--requests {path}: {error.strerror}") from error
    if not found:
        raise _no_traffic(path, bad) if bad else StartupFailed(f"--requests {path}: there is no request in it")
    times = [request.at_s for request in found if request.at_s is not None]
    if len(times) == len(found):
        first = min(times)
        found = [replace(request, at_s=at_s - first) for request, at_s in zip(found, times, strict=True)]
        found.sort(key=lambda request: request.at_s or 0.0)
    else:
        found = [replace(request, at_s=None) for request in found]
    notes = [_MADE_UP] if times else []
    notes += [f"left out: {each}" for each in bad[:_MOST_BAD_LINES]]
    if len(bad) > _MOST_BAD_LINES:
        notes.append(f"left out: {len(bad) - _MOST_BAD_LINES} more lines")
    return Traffic("recording" if times else "OpenAI batch", tuple(found), tuple(notes))


def _read(path: Path, stand_ins: StandIns, limit: int | None) -> tuple[list[TrafficRequest], list[str]]:
    """Return the requests, and what is wrong with other lines. Raises StartupFailed if these are the most."""
    found, bad, offset = list[TrafficRequest](), list[str](), 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            start, offset = offset, offset + len(raw)
            if not raw.strip():
                continue
            if len(found) == limit:
                break
            try:
                name, at_s = _head(raw)
            except (ValueError, msgspec.DecodeError) as error:  # a recording may end within a line
                bad.append(f"line {number}: {error}")
                if len(bad) > max(_MOST_BAD_LINES, len(found)):
                    raise _no_traffic(path, bad) from error
                continue
            make = partial(_ask, path, number, (start, len(raw)), stand_ins)
            found.append(TrafficRequest(name or str(number), at_s, make))
    return found, bad


def _no_traffic(path: Path, bad: list[str]) -> StartupFailed:
    reason = f"{bad[0]}; docs/guides/compare.md says how to write one"
    return StartupFailed(f"--requests {path} is neither a recording nor an OpenAI batch file: {reason}")


def _head(raw: bytes) -> tuple[str, float | None]:
    """Return a line's name and time. Raises ValueError and msgspec's DecodeError."""
    head = msgspec.json.decode(raw, type=_Head)
    if not urlsplit(head.url).path.startswith("/"):
        raise ValueError(f"url is {head.url[:100]!r}, which has no path")
    if head.medialane is None:
        return head.custom_id, None
    if head.medialane.format != RECORDING_FORMAT:
        raise ValueError("it was recorded by another release of medialane, in a format that this one does not know")
    return head.custom_id, head.medialane.at


def _ask(path: Path, number: int, place: tuple[int, int], stand_ins: StandIns) -> Ask:
    """Read a line again, by its offset and size; return its request, with media of the recorded sizes in place of
    stand-ins. Raises UnusableLine."""

    def made(text: str, is_bare: bool) -> str:
        stand_in = parse_stand_in(text)
        if stand_in is None:
            return text
        return stand_ins.bare(stand_in) if is_bare else stand_ins.url(stand_in)

    try:
        with path.open("rb") as file:
            file.seek(place[0])
            line = msgspec.json.decode(file.read(place[1]), type=_Whole)
        return Ask(urlsplit(line.url).path, with_media(line.body, made))
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise UnusableLine(f"{path.name}, line {number}: {error}") from error


_TYPES = {"image": "image/jpeg", "video": "video/mp4", "audio": "audio/wav"}
#: Of media whose size was not recorded.
_IMAGE, _VIDEO, _NUM_FRAMES, _SECONDS = (640, 480), (320, 240), 16, 3.0
#: More are not made: a line of a file must not fill the memory.
_MOST_PIXELS, _MOST_SIDE, _MOST_FRAMES, _MOST_SECONDS = 64 << 20, 16384, 768, 3600.0
_SAMPLES_PER_S = 16000


@dataclass(frozen=True)
class StandIns:
    """Media for stand-ins, kept in a folder. For any thread."""

    folder: Path

    def url(self, stand_in: MediaStandIn) -> str:
        return f"data:{_TYPES[stand_in.modality]};base64,{self.bare(stand_in)}"

    def bare(self, stand_in: MediaStandIn) -> str:
        """Return the media as base64. Raises OSError if they cannot be kept."""
        sizes = (stand_in.width, stand_in.height, stand_in.num_frames, stand_in.num_samples)
        path = self.folder / f"{stand_in.modality}-{stand_in.key}-{'-'.join(map(str, sizes))}"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = _made(stand_in)
            self.folder.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
            write_private(new, data)
            os.replace(new, path)
        return b64encode(data).decode()


def _made(stand_in: MediaStandIn) -> bytes:
    seed = int(stand_in.key[:12], 16)
    match stand_in.modality:
        case "image":
            return sample_jpeg(seed, *_size(stand_in, _IMAGE))
        case "video":
            width, height = _size(stand_in, _VIDEO)
            frames = min(stand_in.num_frames or _NUM_FRAMES, _MOST_FRAMES)
            return sample_video(seed, frames, max(16, width & ~1), max(16, height & ~1))
        case "audio":
            seconds = stand_in.num_samples / _SAMPLES_PER_S or _SECONDS
            return sample_audio(100 + seed % 900_000 / 1000, min(seconds, _MOST_SECONDS))


def _size(stand_in: MediaStandIn, default: tuple[int, int]) -> tuple[int, int]:
    if not (stand_in.width and stand_in.height):
        return default
    width, height = min(stand_in.width, _MOST_SIDE), min(stand_in.height, _MOST_SIDE)
    return width, min(height, _MOST_PIXELS // width)
