"""Media out of a JSON body: references in their place, base64 decoded straight from the body's bytes.

Theory of operation. Three steps, none of which looks at a media payload byte by byte in Python:

1. *Cut.* What follows `;base64,` up to the next quote can be taken out of a JSON string without changing where strings
   begin and end, unless there is a backslash in it. So payloads are found by searching for bytes (memory speed), and
   what is left, the *skeleton*, is small. A payload that is written with escapes stays in: slower, and just as right.
2. *Parse.* The skeleton is parsed once, typed for the places where media stand; whatever else a place holds is skipped,
   since judging it is for the application behind us. Values come as views of the skeleton, so each tells its position,
   and a position tells which payload was cut from inside it: nothing that a client writes can pose as our mark.
3. *Lift.* Each media string becomes a `MediaRef`, and the string in the body `medialane:<n>`, by slices of the original
   body: every other byte is passed on as it came, payloads cut from other strings included.

A body that is not JSON, or not of the expected form, is passed on untouched, and the application answers as it does. A
URL that was not lifted from its place is nothing that the application could fetch: it resolves references only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from medialane.core.errors import InvalidMediaUrl, MedialaneError, TooManyMediaItems
from medialane.core.media import MediaRef, Modality
from medialane.gateway.scope import REFERENCE_SCHEME
from medialane.media import DataUrl, MediaConfig, decode_base64, parse_data_url
from medialane.media.data_url import parse_header

_MARK = b";base64,"
#: Shorter payloads are not worth a cut. No more than so many strings are looked at, whatever a body is made of.
_MIN_CUT_BYTES = 1024
_MAX_LOOKS = 256

_NOT_TEXT = "the media URL is not valid text"

_MODALITIES: tuple[tuple[str, Modality], ...] = (
    ("image_url", "image"),
    ("video_url", "video"),
    ("audio_url", "audio"),
    ("input_audio", "audio"),
)

#: Whatever JSON has besides objects and arrays.
_Scalar = str | int | float | bool | None


class _Object(msgspec.Struct, gc=False):
    """Any object."""


class _Part(msgspec.Struct, gc=False):
    image_url: msgspec.Raw = msgspec.Raw()
    video_url: msgspec.Raw = msgspec.Raw()
    audio_url: msgspec.Raw = msgspec.Raw()
    input_audio: msgspec.Raw = msgspec.Raw()


class _Message(msgspec.Struct, gc=False):
    content: list[_Part | list[msgspec.Raw] | _Scalar] | _Object | _Scalar = None


_Messages = list[_Message | list[msgspec.Raw] | _Scalar] | _Object | _Scalar


class _Body(msgspec.Struct):
    """A chat completion has messages, a response has input."""

    messages: _Messages = None
    input: _Messages = None
    cache_salt: msgspec.Raw = msgspec.Raw()


class _UrlObject(msgspec.Struct):
    url: msgspec.Raw = msgspec.Raw()


class _AudioObject(msgspec.Struct):
    data: msgspec.Raw = msgspec.Raw()
    format: msgspec.Raw = msgspec.Raw()


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_url_object = msgspec.json.Decoder(_UrlObject).decode
_decode_audio_object = msgspec.json.Decoder(_AudioObject).decode
_decode_string = msgspec.json.Decoder(str).decode

#: What msgspec raises for bytes that are not JSON of the wanted form: broken UTF-8 and deep nesting included.
_NOT_OURS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Intake:
    """A body without its media. `refs[n]` is what stands as `medialane:<n>` in `body`; they share `cache_salt`.

    In an `input_audio` part the reference stands in place of the base64 data, which vLLM's app then makes a data: URL
    of: `data:audio/<format>;base64,medialane:<n>`.
    """

    body: bytes
    refs: tuple[MediaRef, ...] = ()
    cache_salt: str | None = None

    def __repr__(self) -> str:
        return f"Intake({len(self.body)} bytes, {self.refs})"


def lift(body: bytes | bytearray, config: MediaConfig) -> Intake:
    """Take the media out of an OpenAI request body (chat completions, responses).

    Raises TooManyMediaItems, InvalidMediaUrl (one in our own scheme), InvalidDataUrl, InvalidBase64, MediaTooLarge,
    EmptyMedia; each names the field.
    """
    skeleton = _Skeleton(body)
    try:
        parsed = _decode_body(skeleton.data)
        places = [*_places("messages", parsed.messages), *_places("input", parsed.input)]
        cache_salt = _string_or_none(parsed.cache_salt)
    except _NOT_OURS:
        return Intake(bytes(body))
    if len(places) > config.max_items:
        message = f"the request has {len(places)} media items, more than {config.max_items}"
        raise TooManyMediaItems(message, param=places[config.max_items].param)
    located = [skeleton.locate(place.string) for place in places]
    refs = tuple(map(partial(_ref, salt=cache_salt or "", config=config), places, located))
    return Intake(_with_references(body, located), refs, cache_salt)


@dataclass(frozen=True, slots=True)
class _Place:
    """A JSON string that stands for media. `audio_format` is set where it is bare base64."""

    modality: Modality
    param: str
    string: msgspec.Raw
    audio_format: str | None = None


@dataclass(frozen=True, slots=True)
class _Located:
    """A JSON string: where it stands in the body, quotes included, and its value, of which `payload` was cut off."""

    start: int
    end: int
    raw: memoryview
    payload: memoryview
    escaped: bool

    def head(self) -> bytes | memoryview:
        """The value's UTF-8, payload aside. Raises InvalidMediaUrl."""
        if not self.escaped:
            return self.raw[1:-1]
        try:
            return _decode_string(self.raw).encode()
        except _NOT_OURS as error:
            raise InvalidMediaUrl(_NOT_TEXT) from error

    def value(self) -> bytes | memoryview:
        """The whole value's UTF-8. Raises InvalidMediaUrl."""
        return bytes(self.head()) + bytes(self.payload) if self.payload else self.head()


class _Skeleton:
    """A body without its payloads, and where they were."""

    def __init__(self, body: bytes | bytearray) -> None:
        self._body = memoryview(body)
        self._cuts = list(_find_payloads(body))
        #: Positions in the skeleton at which a payload is missing, and how many bytes are missing before each.
        self._positions: list[int] = []
        self._missing = [0]
        kept, at = [], 0
        for start, end in self._cuts:
            kept.append(self._body[at:start])
            self._positions.append(start - self._missing[-1])
            self._missing.append(self._missing[-1] + end - start)
            at = end
        self.data = b"".join([*kept, self._body[at:]]) if self._cuts else bytes(body)

    def locate(self, string: msgspec.Raw) -> _Located:
        """Where in the body a string of the skeleton stands, and the payload that was cut from it, if any."""
        raw = memoryview(string)
        start = _address(string) - _address(self.data)
        end = start + len(raw)
        first, after = bisect_left(self._positions, start), bisect_left(self._positions, end)
        payload = self._body[slice(*self._cuts[first])] if first < after else self._body[:0]
        escaped = self.data.find(b"\\", start, end) >= 0
        return _Located(start + self._missing[first], end + self._missing[after], raw, payload, escaped)


def _find_payloads(body: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Ranges of the body to leave out: at most one in any string. Every byte is looked at once."""
    at = 0
    for _ in range(_MAX_LOOKS):
        mark = body.find(_MARK, at)
        if mark < 0:
            return
        start = mark + len(_MARK)
        end = body.find(b'"', start)
        if end < 0:
            return
        if end - start >= _MIN_CUT_BYTES and body.find(b"\\", start, end) < 0:
            yield start, end
        at = end


def _address(data: bytes | msgspec.Raw) -> int:
    """Where in memory the bytes lie: msgspec.Raw is a view, and this is how it tells of what."""
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def _places(field: str, messages: object) -> Iterator[_Place]:
    """Every media string of a list of messages, in order."""
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.content if isinstance(message, _Message) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, _Part):
                yield from _places_of(part, f"{field}[{i}].content[{j}]")


def _places_of(part: _Part, param: str) -> Iterator[_Place]:
    for name, modality in _MODALITIES:
        value: msgspec.Raw = getattr(part, name)
        kind = bytes(memoryview(value)[:1])
        if kind == b'"' and name != "input_audio":
            string, audio_format = value, None
        elif kind == b"{":
            string, audio_format = _string_of(name, value)
        else:
            continue
        if len(memoryview(string)) > 2 and bytes(memoryview(string)[:1]) == b'"':  # vLLM takes "" as no media
            yield _Place(modality, f"{param}.{name}", string, audio_format)


def _string_of(name: str, value: msgspec.Raw) -> tuple[msgspec.Raw, str | None]:
    """The media string inside an object, and its format where it is bare base64."""
    if name != "input_audio":
        return _decode_url_object(value).url, None
    audio = _decode_audio_object(value)
    return audio.data, _string_or_none(audio.format) or ""


def _string_or_none(value: msgspec.Raw) -> str | None:
    return _decode_string(value) if bytes(memoryview(value)[:1]) == b'"' else None


def _ref(place: _Place, located: _Located, *, salt: str, config: MediaConfig) -> MediaRef:
    """The reference that a media string stands for. Errors name the field."""
    try:
        if place.audio_format is not None:
            data = decode_base64(located.value(), config.max_data_url_bytes)
            return MediaRef(place.modality, place.param, data=data, media_type=f"audio/{place.audio_format}", salt=salt)
        found = _data_url(located, config.max_data_url_bytes)
        if found is not None:
            return MediaRef(place.modality, place.param, data=found.data, media_type=found.media_type, salt=salt)
        return MediaRef(place.modality, place.param, url=_url(located), salt=salt)
    except MedialaneError as error:
        raise error.at(place.param) from error


def _data_url(located: _Located, max_bytes: int) -> DataUrl | None:
    """The decoded data: URL, its payload straight from the body; None if it is no data: URL."""
    head = located.head()
    if bytes(head[:5]).lower() != b"data:":
        return None
    if located.payload and bytes(head).find(b",") == len(head) - 1:
        return DataUrl(parse_header(bytes(head[:-1])), decode_base64(located.payload, max_bytes))
    return parse_data_url(located.value(), max_bytes)


def _url(located: _Located) -> str:
    try:
        url = str(located.value(), "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidMediaUrl(_NOT_TEXT) from error
    if url[: len(REFERENCE_SCHEME)].lower() == REFERENCE_SCHEME:
        raise InvalidMediaUrl(f"{REFERENCE_SCHEME} URLs are the gateway's own")
    return url


def _with_references(body: bytes | bytearray, located: list[_Located]) -> bytes:
    """The body, the n-th of the located strings replaced by a reference to n."""
    view = memoryview(body)
    parts: list[bytes | memoryview] = []
    at = 0
    for n in sorted(range(len(located)), key=lambda n: located[n].start):
        parts += [view[at : located[n].start], f'"{REFERENCE_SCHEME}{n}"'.encode()]
        at = located[n].end
    return b"".join([*parts, view[at:]])
