"""Stand-ins: the URLs that a recording has for media of which only the size is kept.

`medialane:sample/image/KEY?width=1024&height=768`. Equal media have equal keys, so whatever is made of a stand-in is
found in caches where the original was.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec

from medialane.gateway.references import REFERENCE_SCHEME
from medialane.types.media import MediaSize, Modality

SAMPLE_SCHEME = f"{REFERENCE_SCHEME}sample/"
_PATTERN = re.compile(rf"{SAMPLE_SCHEME}(image|video|audio)/([0-9a-f]{{1,64}})(?:\?(.*))?")
#: The only member that has bare base64 (`intake.place.Base64Place`); elsewhere media are URLs.
_BARE = "data"
_MEMBERS = ("width", "height", "num_frames", "num_samples", "num_bytes")
#: What a number in a file may be at most: a line must not have compare fill the memory.
_MOST = 1 << 30


class StandIn(msgspec.Struct, frozen=True):
    """Media of this key and size; 0 is unknown. `num_samples` counts those of audio at 16 kHz, `num_bytes` is the size
    of the file."""

    modality: Modality
    key: str
    width: int = 0
    height: int = 0
    num_frames: int = 0
    num_samples: int = 0
    num_bytes: int = 0

    @classmethod
    def of(cls, modality: Modality, key: str, size: MediaSize, num_bytes: int) -> StandIn:
        return cls(modality, key, size.width, size.height, size.num_frames, size.num_samples, num_bytes)

    @property
    def url(self) -> str:
        known = {name: value for name in _MEMBERS if (value := getattr(self, name))}
        return f"{SAMPLE_SCHEME}{self.modality}/{self.key}" + (f"?{urlencode(known)}" if known else "")


def with_media(value: Any, other: Callable[[str, bool], str], name: str = "") -> Any:
    """Return JSON in which each string is replaced by `other(text, is_bare)`. Where it `is_bare`, media are base64
    without a `data:` URL around it."""
    match value:
        case str():
            return other(value, name == _BARE)
        case dict():
            return {key: with_media(each, other, key) for key, each in value.items()}
        case list():
            return [with_media(each, other, name) for each in value]
        case _:
            return value


def parse_stand_in(url: str) -> StandIn | None:
    """Return the stand-in of a recorded URL, None for any other string. Raises ValueError."""
    if not url.startswith(SAMPLE_SCHEME):
        return None
    match = _PATTERN.fullmatch(url)
    if match is None:
        raise ValueError(f"{url[:100]} names no media")
    sizes = {name: int(value) for name, value in parse_qsl(match[3] or "") if name in _MEMBERS}
    if any(not 0 <= value <= _MOST for value in sizes.values()):
        raise ValueError(f"{url[:100]} has no usable size")
    return msgspec.convert({"modality": match[1], "key": match[2], **sizes}, StandIn)
