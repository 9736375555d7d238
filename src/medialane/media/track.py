"""What a container's header says of one of its tracks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TrackKind = Literal["video", "audio", "other"]


@dataclass(frozen=True, slots=True)
class Track:
    """Claims, not facts; zero where the header says nothing. `is_packed`: its decoder interleaves the channels."""

    kind: TrackKind
    duration_s: float = 0.0
    num_frames: int = 0
    width: int = 0
    height: int = 0
    num_channels: int = 0
    is_packed: bool = False
