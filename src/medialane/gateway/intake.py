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

What a client says of our own is read on the way: the options of an item beside its URL, and what is asked for under
the body's `medialane`, which is taken out.

Embeddings (`image_embeds` and the like) become references, too, and so do items given by their `uuid` alone. vLLM's app
takes neither for media that its connector fetches: it hands on their uuid, so that is where the reference stands.

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

from medialane.core.embeds import UNNAMED
from medialane.core.errors import InvalidBody, InvalidMediaUrl, InvalidRequest, MedialaneError, TooManyMediaItems
from medialane.core.media import Alias, MediaRef, Modality
from medialane.gateway.item_options import ItemOptions, read_io, read_processor_options
from medialane.gateway.scope import REFERENCE_SCHEME
from medialane.media import DataUrl, MediaConfig, decode_base64
from medialane.media.data_url import parse_header, read_jpeg_frames, split_data_url
from medialane.media.embeds import read_embeds

_MARK = b";base64,"
#: Shorter payloads are not worth a cut. No more than so many strings are looked at, whatever a body is made of.
_MIN_CUT_BYTES = 1024
_MAX_LOOKS = 256

#: Parsed values take fifty times the memory of their text, and vLLM's own parsing of a part takes tens of microseconds
#: of the event loop: a body of 60 MB can be 20 million parts. Text has commas, too, but not so many.
_MAX_COMMAS = 1_000_000
_MAX_PARTS = 20_000

_NOT_TEXT = "the media URL is not valid text"

_MODALITIES: tuple[tuple[str, Modality], ...] = (
    ("image_url", "image"),
    ("video_url", "video"),
    ("audio_url", "audio"),
    ("input_audio", "audio"),
)

_EMBEDS: tuple[tuple[str, Modality], ...] = (
    ("image_embeds", "image"),
    ("audio_embeds", "audio"),
    ("video_embeds", "video"),
)

#: Whatever JSON has besides objects and arrays.
_Scalar = str | int | float | bool | None


class _Object(msgspec.Struct, gc=False):
    """Any object."""


class _Part(msgspec.Struct, gc=False):
    """A part of a message. Of Anthropic's, `image` has a source, and `tool_result` parts of its own."""

    type: msgspec.Raw = msgspec.Raw()
    image_url: msgspec.Raw = msgspec.Raw()
    video_url: msgspec.Raw = msgspec.Raw()
    audio_url: msgspec.Raw = msgspec.Raw()
    input_audio: msgspec.Raw = msgspec.Raw()
    image_embeds: msgspec.Raw = msgspec.Raw()
    audio_embeds: msgspec.Raw = msgspec.Raw()
    video_embeds: msgspec.Raw = msgspec.Raw()
    uuid: msgspec.Raw = msgspec.Raw()
    source: msgspec.Raw = msgspec.Raw()
    content: list[_Part | list[msgspec.Raw] | _Scalar] | _Object | _Scalar = None


class _Message(msgspec.Struct, gc=False):
    content: list[_Part | list[msgspec.Raw] | _Scalar] | _Object | _Scalar = None


_Messages = list[_Message | list[msgspec.Raw] | _Scalar] | _Object | _Scalar
_Conversations = list[_Message | list[_Message | list[msgspec.Raw] | _Scalar] | _Scalar] | _Object | _Scalar


class _Body(msgspec.Struct):
    """A chat completion has messages (a batch of them: lists of messages), a response has input."""

    messages: _Conversations = None
    input: _Messages = None
    cache_salt: msgspec.Raw = msgspec.Raw()
    medialane: msgspec.Raw = msgspec.Raw()


class _UrlObject(ItemOptions):
    url: msgspec.Raw = msgspec.Raw()


class _AudioObject(msgspec.Struct):
    data: msgspec.Raw = msgspec.Raw()
    format: msgspec.Raw = msgspec.Raw()


class _Source(msgspec.Struct):
    """Where an Anthropic image is: at a URL, or here."""

    type: msgspec.Raw = msgspec.Raw()
    url: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()
    media_type: msgspec.Raw = msgspec.Raw()


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_url_object = msgspec.json.Decoder(_UrlObject).decode
_decode_audio_object = msgspec.json.Decoder(_AudioObject).decode
_decode_source = msgspec.json.Decoder(_Source).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_bool = msgspec.json.Decoder(bool).decode
_decode_string = msgspec.json.Decoder(str).decode

#: What msgspec raises for bytes that are not JSON of the wanted form: broken UTF-8 and deep nesting included.
_NOT_OURS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Intake:
    """A body without its media. `refs[n]` is what stands as `medialane:<n>` in `body`; they share `cache_salt`.

    Where the client sends bare base64 (`input_audio`, an Anthropic image), the reference stands in its place, and
    vLLM's app makes a data: URL of it: `data:audio/<format>;base64,medialane:<n>`. `report` is whether the client
    asks what was used of the media.
    """

    body: bytes
    refs: tuple[MediaRef, ...] = ()
    cache_salt: str | None = None
    report: bool = False

    def __repr__(self) -> str:
        return f"Intake({len(self.body)} bytes, {self.refs})"


def lift(body: bytes | bytearray, config: MediaConfig) -> Intake:
    """Take the media out of a request body (chat completions, batches of them, responses, Anthropic's messages).

    Raises TooManyMediaItems, InvalidMediaUrl (one in our own scheme), InvalidDataUrl, InvalidBase64, MediaTooLarge,
    EmptyMedia, InvalidEmbeds, InvalidRequest (an option of an item, or of our own); each names the field. And
    InvalidBody, for one that is made of so many small values that parsing it would hold up everyone.
    """
    skeleton = _Skeleton(body)
    if skeleton.data.count(b",") > _MAX_COMMAS:
        raise InvalidBody(f"the request has more than {_MAX_COMMAS} values")
    try:
        parsed = _decode_body(skeleton.data)
        _check_parts(parsed)
        places = [*_places("messages", parsed.messages), *_places("input", parsed.input)]
        cache_salt = _string_or_none(parsed.cache_salt)
    except _NOT_OURS:
        return Intake(bytes(body))
    if len(places) > config.max_items:
        message = f"the request has {len(places)} media items, more than {config.max_items}"
        raise TooManyMediaItems(message, param=places[config.max_items].param)
    report = _wants_report(parsed.medialane)
    refs = tuple(map(partial(_ref, skeleton, salt=cache_salt or "", config=config), places))
    edits = [edit for n, place in enumerate(places) for edit in _edits(skeleton, place, n)]
    if memoryview(parsed.medialane):
        edits.append((*_member(body, skeleton.locate(parsed.medialane)), b""))
    return Intake(_edited(body, edits), refs, cache_salt, report)


def _check_parts(parsed: _Body) -> None:
    """Raise InvalidBody for more messages and parts than a conversation has."""
    todo: list[object] = [parsed.messages, parsed.input]
    num_parts = 0
    for value in todo:
        found = value.content if isinstance(value, _Message) else value
        if isinstance(found, list):
            num_parts += len(found)
            if num_parts > _MAX_PARTS:
                raise InvalidBody(f"the request has more than {_MAX_PARTS} messages and parts")
            todo += found


@dataclass(frozen=True, slots=True)
class _Place:
    """A JSON string that stands for media. `media_type` is set where it is bare base64.

    Of embeddings (`is_embeds`) it is the value, string or object; of an item given by uuid alone it is the `uuid`.
    """

    modality: Modality
    param: str
    string: msgspec.Raw
    media_type: str | None = None
    options: ItemOptions | None = None
    uuid: msgspec.Raw | None = None
    is_embeds: bool = False

    @property
    def is_named(self) -> bool:
        """Whether the item is given by uuid alone."""
        return self.string is self.uuid

    @property
    def is_given(self) -> bool:
        """Whether there is a string, and media: vLLM takes "" as none."""
        if self.is_embeds:
            return _kind(self.string) == b"{" or len(memoryview(self.string)) > 2
        return len(memoryview(self.string)) > 2 and bytes(memoryview(self.string)[:1]) == b'"'


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
    """Every media string of a list of messages, or of lists of them, in order."""
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        param = f"{field}[{i}]"
        if isinstance(message, list):
            yield from _places(param, message)
        elif isinstance(message, _Message):
            yield from _places_in(message.content, f"{param}.content")


def _places_in(content: object, param: str) -> Iterator[_Place]:
    for j, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, _Part):
            given = [place for place in _places_of(part, f"{param}[{j}]") if place.is_given]
            yield from given or _named(part, f"{param}[{j}]")


def _places_of(part: _Part, param: str) -> Iterator[_Place]:
    for name, modality in _MODALITIES:
        value: msgspec.Raw = getattr(part, name)
        kind = _kind(value)
        if kind == b'"' and name != "input_audio":
            yield _Place(modality, f"{param}.{name}", value, uuid=part.uuid)
        elif kind == b"{":
            yield _place_inside(name, modality, f"{param}.{name}", value, part.uuid)
    yield from _embeds(part, param)
    if _kind(part.source) == b"{" and _string_or_none(part.type) == "image":
        yield _place_of_source(_decode_source(part.source), f"{param}.source")
    if isinstance(part.content, list) and _string_or_none(part.type) == "tool_result":
        yield from _places_in(part.content, f"{param}.content")


def _embeds(part: _Part, param: str) -> Iterator[_Place]:
    """Embeddings, where vLLM takes the part for such with a uuid as well as without."""
    present = _present(part)
    if len(present) != 1 or present[0] not in _EMBEDS:
        return
    ((name, modality),) = present
    value: msgspec.Raw = getattr(part, name)
    is_said = _string_or_none(part.type) in (None, name) or _kind(part.uuid) == b'"'
    if is_said and _kind(value) in (b'"', b"{"):
        yield _Place(modality, f"{param}.{name}", value, uuid=part.uuid, is_embeds=True)


def _named(part: _Part, param: str) -> Iterator[_Place]:
    """An item given by its uuid alone, where there is no doubt what it is."""
    present = _present(part)
    if len(present) != 1 or _kind(part.uuid) != b'"':
        return
    ((name, modality),) = present
    value: msgspec.Raw = getattr(part, name)
    is_embeds = present[0] in _EMBEDS
    options = None
    if _kind(value) == b"{" and not is_embeds:
        inside = _place_inside(name, modality, param, value, part.uuid)
        value, options = inside.string, inside.options
    if bytes(memoryview(value)) in (b"", b"null", b'""'):
        yield _Place(modality, f"{param}.{name}", part.uuid, options=options, uuid=part.uuid, is_embeds=is_embeds)


def _present(part: _Part) -> list[tuple[str, Modality]]:
    return [found for found in (*_MODALITIES, *_EMBEDS) if _kind(getattr(part, found[0]))]


def _kind(value: msgspec.Raw) -> bytes:
    """The first character of a JSON value, which tells what it is; empty where there is none."""
    return bytes(memoryview(value)[:1])


def _place_inside(name: str, modality: Modality, param: str, value: msgspec.Raw, uuid: msgspec.Raw) -> _Place:
    """The place of the media string inside an object."""
    if name == "input_audio":
        audio = _decode_audio_object(value)
        media_type = f"audio/{_string_or_none(audio.format) or ''}"
        return _Place(modality, param, audio.data, media_type=media_type, uuid=uuid)
    found = _decode_url_object(value)
    return _Place(modality, param, found.url, options=found, uuid=uuid)


def _place_of_source(source: _Source, param: str) -> _Place:
    """As vLLM reads it: what is not said to be a URL is base64, of a JPEG unless said otherwise."""
    if _string_or_none(source.type) == "url":
        return _Place("image", param, source.url)
    return _Place("image", param, source.data, media_type=_string_or_none(source.media_type) or "image/jpeg")


def _string_or_none(value: msgspec.Raw) -> str | None:
    return _decode_string(value) if _kind(value) == b'"' else None


def _wants_report(own: msgspec.Raw) -> bool:
    """What the client asks for under `medialane`. Raises InvalidRequest for what we do not know."""
    if _kind(own) in (b"", b"n"):
        return False
    try:
        asked = _decode_members(own)
    except _NOT_OURS as error:
        raise InvalidRequest("medialane must be an object", param="medialane") from error
    for name in asked:
        if name != "report":
            raise InvalidRequest("the only key of medialane is report", param=f"medialane.{name[:64]}")
    try:
        return "report" in asked and _decode_bool(asked["report"])
    except msgspec.DecodeError as error:
        raise InvalidRequest("report must be true or false", param="medialane.report") from error


def _ref(skeleton: _Skeleton, place: _Place, *, salt: str, config: MediaConfig) -> MediaRef:
    """The reference that a place stands for. Errors name the field."""
    io = options = b"{}"
    if (asked := place.options) is not None:
        io = read_io(asked, place.modality, place.param, config)
        options = read_processor_options(asked, place.modality, place.param, config)
    alias = _alias(place, io, options)
    ref = partial(MediaRef, place.modality, place.param, salt=salt, io=io, options=options, alias=alias)
    if place.is_named:
        return ref(is_embeds=place.is_embeds)
    if place.is_embeds:
        fields = _fields(skeleton, place)
        return ref(data=read_embeds(fields, place.param, config.max_data_url_bytes), is_embeds=True)
    located = skeleton.locate(place.string)
    try:
        if (found := _data(place, located, config.max_data_url_bytes)) is None:
            return ref(url=_url(located))
    except MedialaneError as error:
        raise error.at(place.param) from error
    return ref(data=found.data, media_type=found.media_type)


def _alias(place: _Place, io: bytes, options: bytes) -> Alias | None:
    uuid = None if place.uuid is None else _string_or_none(place.uuid)
    if uuid is None:
        return None
    return Alias(uuid, f"{place.modality}_embeds" if place.is_embeds else place.modality, io, options)


def _fields(skeleton: _Skeleton, place: _Place) -> dict[str, bytes | memoryview | msgspec.Raw]:
    """The fields of embeddings: base64 as it stands in the body, and whatever else as it is."""
    if _kind(place.string) == b'"':
        return {UNNAMED: skeleton.locate(place.string).value()}
    members = _decode_members(place.string).items()
    return {name: skeleton.locate(raw).value() if _kind(raw) == b'"' else raw for name, raw in members}


def _edits(skeleton: _Skeleton, place: _Place, number: int) -> Iterator[tuple[int, int, bytes]]:
    """What becomes of a place in the body."""
    reference = f'"{REFERENCE_SCHEME}{number}"'.encode()
    found = skeleton.locate(place.string)
    if not place.is_embeds or place.is_named:
        yield found.start, found.end, reference
    elif place.uuid is not None and _kind(place.uuid):
        yield found.start, found.end, b"null"
        uuid = skeleton.locate(place.uuid)
        yield uuid.start, uuid.end, reference
    else:
        yield found.start, found.end, b'null,"uuid":' + reference


def _data(place: _Place, located: _Located, max_bytes: int) -> DataUrl | None:
    """The media that the string holds itself; None if it is the URL of some that it does not."""
    if place.media_type is not None:
        return DataUrl(place.media_type, decode_base64(located.value(), max_bytes))
    head = located.head()
    if bytes(head[:5]).lower() != b"data:":
        return None
    header, payload = _split(located, head)
    media_type = parse_header(header)
    if place.modality == "video" and media_type == "video/jpeg":
        return DataUrl(media_type, read_jpeg_frames(payload, max_bytes))
    return DataUrl(media_type, decode_base64(payload, max_bytes))


def _split(located: _Located, head: bytes | memoryview) -> tuple[bytes, memoryview]:
    """Header and payload of a data: URL, the payload straight from the body where it was cut from there."""
    if located.payload and bytes(head).find(b",") == len(head) - 1:
        return bytes(head[:-1]), located.payload
    return split_data_url(located.value())


def _url(located: _Located) -> str:
    try:
        url = str(located.value(), "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidMediaUrl(_NOT_TEXT) from error
    if url[: len(REFERENCE_SCHEME)].lower() == REFERENCE_SCHEME:
        raise InvalidMediaUrl(f"{REFERENCE_SCHEME} URLs are the gateway's own")
    return url


def _member(body: bytes | bytearray, value: _Located) -> tuple[int, int]:
    """Where a member of an object stands in the body, its key and one of the commas around it included."""
    start = body.rindex(b'"', 0, body.rindex(b'"', 0, body.rindex(b":", 0, value.start)))
    while body[start - 1 : start].isspace():
        start -= 1
    if body[start - 1 : start] == b",":
        return start - 1, value.end
    end = value.end
    while body[end : end + 1].isspace():
        end += 1
    return start, end + 1 if body[end : end + 1] == b"," else end


def _edited(body: bytes | bytearray, edits: list[tuple[int, int, bytes]]) -> bytes:
    """The body, each range [start, end) of it replaced."""
    view = memoryview(body)
    parts: list[bytes | memoryview] = []
    at = 0
    for start, end, replacement in sorted(edits):
        parts += [view[at:start], replacement]
        at = end
    return b"".join([*parts, view[at:]])
