"""Makes media for stand-ins: photo-like images, videos and tones of the recorded sizes, the same for the same key.

Making an image takes dozens of milliseconds of a core that the compared servers need: it is made once, before the
first turn, and read from a file when it is sent.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from pybase64 import b64encode

from medialane.gateway.recording import StandIn
from medialane.runtime.private_file import write_private
from medialane.testing.sample_audio import sample_audio
from medialane.testing.sample_images import sample_jpeg
from medialane.testing.sample_video import sample_video

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

    def url(self, stand_in: StandIn) -> str:
        return f"data:{_TYPES[stand_in.modality]};base64,{self.bare(stand_in)}"

    def bare(self, stand_in: StandIn) -> str:
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


def _made(stand_in: StandIn) -> bytes:
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


def _size(stand_in: StandIn, default: tuple[int, int]) -> tuple[int, int]:
    if not (stand_in.width and stand_in.height):
        return default
    width, height = min(stand_in.width, _MOST_SIDE), min(stand_in.height, _MOST_SIDE)
    return width, min(height, _MOST_PIXELS // width)
