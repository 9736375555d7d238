"""Options of one media item, given next to its URL: the number of frames and pixels that the model gets.

`{"type": "video_url", "video_url": {"url": ..., "fps": 2, "max_frames": 64, "max_pixels": 200704}}`. Keys that do not
apply to the item's modality are ignored. Unknown ones are errors: vLLM, which ignores them, has no options that a
client could misspell.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TypeVar

import msgspec
from msgspec.structs import astuple

from medialane.media import MediaConfig
from medialane.types.errors import InvalidRequest, TooManyFrames
from medialane.types.hashing import canonical_options
from medialane.types.media import MODALITIES, Modality

#: Higher than the frame rate of any realistic input. The run time of some of vLLM's samplers is proportional to it.
MAX_FPS = 240

_decode_number = msgspec.json.Decoder(int | float | None).decode


class ItemOptions(msgspec.Struct):
    """The options of an item as given in the request, not yet parsed."""

    fps: msgspec.Raw = msgspec.Raw()
    num_frames: msgspec.Raw = msgspec.Raw()
    max_frames: msgspec.Raw = msgspec.Raw()
    min_pixels: msgspec.Raw = msgspec.Raw()
    max_pixels: msgspec.Raw = msgspec.Raw()


_NONE_GIVEN = astuple(ItemOptions())

_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

#: Most characters of a client's key in an error.
_MAX_KEY_CHARS = 64

_Object = TypeVar("_Object", bound=msgspec.Struct)


def decode_item(value: msgspec.Raw, decoder: msgspec.json.Decoder[_Object], param: str) -> _Object:
    """Decode the object of a media item as a struct that forbids unknown fields, its fields raw. Raises InvalidRequest
    naming an unknown key, and the exceptions in UNREADABLE."""
    try:
        return decoder.decode(value)
    except msgspec.ValidationError as error:
        names: tuple[str, ...] = decoder.type.__struct_fields__
        key = next((key for key in _decode_members(value) if key not in names), "")[:_MAX_KEY_CHARS]
        close = get_close_matches(key, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the known ones are {', '.join(names)}"
        raise InvalidRequest(f"unknown key {key} of a media item: {hint}", param=f"{param}.{key}") from error


def read_options(given: ItemOptions | None, modality: Modality, param: str, config: MediaConfig) -> tuple[bytes, bytes]:
    """Return the item's `MediaRef.io` and `MediaRef.options`. Raises InvalidRequest naming the key."""
    if given is None or astuple(given)[: len(_NONE_GIVEN)] == _NONE_GIVEN:
        return b"{}", b"{}"
    traits = MODALITIES[modality]
    io = _read_frames(given, param, config) if traits.has_frames else b"{}"
    options = _read_pixels(given, param, config.max_pixels(modality)) if traits.has_pixels else b"{}"
    return io, options


def _read_frames(given: ItemOptions, param: str, config: MediaConfig) -> bytes:
    fps = _read(given.fps, f"{param}.fps")
    if fps is not None and not 0 < fps <= MAX_FPS:
        raise InvalidRequest(f"fps must be above 0 and at most {MAX_FPS}", param=f"{param}.fps")
    num_frames = _read_count(given.num_frames, f"{param}.num_frames")
    if num_frames is not None and num_frames > config.max_sampled_frames:
        message = f"num_frames must be at most {config.max_sampled_frames}"
        raise TooManyFrames(message, param=f"{param}.num_frames")
    max_frames = _read_count(given.max_frames, f"{param}.max_frames")
    if max_frames is not None:
        max_frames = min(max_frames, config.max_sampled_frames)
    return _canonical(fps=fps, num_frames=num_frames, max_frames=max_frames)


def _read_pixels(given: ItemOptions, param: str, limit: int) -> bytes:
    max_pixels = _read_count(given.max_pixels, f"{param}.max_pixels")
    if max_pixels is not None:
        max_pixels = min(max_pixels, limit)
    min_pixels = _read_count(given.min_pixels, f"{param}.min_pixels")
    if min_pixels is not None and min_pixels > (max_pixels or limit):
        message = f"min_pixels must be at most {'max_pixels' if max_pixels else limit}"
        raise InvalidRequest(message, param=f"{param}.min_pixels")
    return _canonical(min_pixels=min_pixels, max_pixels=max_pixels)


def _canonical(**options: float | None) -> bytes:
    return canonical_options({key: value for key, value in options.items() if value is not None})


def _read_count(raw: msgspec.Raw, param: str) -> int | None:
    number = _read(raw, param)
    if number is not None and (not isinstance(number, int) or number < 1):
        raise InvalidRequest("the option must be a whole number of at least 1", param=param)
    return number


def _read(raw: msgspec.Raw, param: str) -> int | float | None:
    """Return the number, as an int if it is integral; None if the key is absent."""
    if not memoryview(raw):
        return None
    try:
        number = _decode_number(raw)
    except msgspec.DecodeError as error:
        raise InvalidRequest("the option must be a number", param=param) from error
    return int(number) if isinstance(number, float) and number.is_integer() else number
