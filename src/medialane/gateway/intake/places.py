"""The places of media in a body, by notation: a URL, bare base64, embeddings, or only a uuid; and the references by
which intake replaces them.

`extract` of a place returns the item, and the edits that replace it in the body by `reference`, a JSON string. Its
errors are MedialaneErrors; one that names no field is about the place, `param`.

vLLM's app does not pass embeddings, or items given only by their uuid, to its media connector but forwards their uuid:
the reference is placed in the uuid.

Next to its URL an item may have options, the number of frames and pixels that the model gets: `{"type": "video_url",
"video_url": {"url": ..., "fps": 2, "max_frames": 64, "max_pixels": 200704}}`. Keys that do not apply to the item's
modality are ignored. Unknown ones are errors: vLLM, which ignores them, has no options that a client could misspell.
"""

from __future__ import annotations

import json
import re
import secrets
from base64 import b64encode
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import islice
from typing import TypeVar

import msgspec
from msgspec.structs import astuple

from medialane.gateway.intake.skeleton import (
    ABSENT,
    NOT_TEXT,
    QUOTE,
    Edit,
    Located,
    Skeleton,
    decode_members,
    first_byte,
)
from medialane.media import MediaConfig, decode_base64
from medialane.media.data_url import (
    MAX_URL_BYTES,
    RDMA_TYPE,
    check_published,
    parse_header,
    read_jpeg_frames,
    split_data_url,
)
from medialane.media.embeds import MAX_FIELDS, read_embeds
from medialane.types.errors import InvalidMediaUrl, InvalidRequest, MediaTooLarge, TooManyFrames
from medialane.types.hashing import canonical_options
from medialane.types.media import MODALITIES, TEXT_TYPE, Alias, MediaRef, Modality
from medialane.types.media_lease import MEDIA_SCHEME, is_leased, leased_hash

#: Scheme of all references. Clients must not use it as a URL.
REFERENCE_SCHEME = "medialane:"
#: By which a client names a feature, where its tensors could be.
FEATURE_SCHEME = f"{REFERENCE_SCHEME}feature/"
_NUM_RANDOM_BYTES = 9
#: Most characters of a client's URL in a message.
_MAX_QUOTED_CHARS = 80
#: Shorter beginnings of a reference may be the end of a word.
_MIN_HEAD = len("medial")


class MediaPlace(msgspec.Struct, frozen=True, gc=False):
    """`string` is the URL of media, `options` are the members next to it. If the client declares a `media_type`, it is
    bare base64 instead, or the URL of leased media."""

    modality: Modality
    param: str
    string: msgspec.Raw
    options: ItemOptions | None = None
    uuid: str | None = None
    media_type: str | None = None

    def extract(
        self, skeleton: Skeleton, reference: bytes, *, salt: str, config: MediaConfig
    ) -> tuple[MediaRef, list[Edit]]:
        io, options = read_options(self.options, self.modality, self.param, config)
        alias = None if self.uuid is None else Alias(self.uuid, self.modality, io, options)
        located = skeleton.locate(self.string)
        if self.media_type is None:
            url, media_type, data = _read_url(located, self.modality, config)
        else:
            url, media_type, data = _read_base64(located, self.media_type, config)
        if media_type == TEXT_TYPE:  # only files are texts, whatever media are declared as
            media_type = None
        ref = MediaRef(self.modality, self.param, url, data, media_type, salt, io, options, alias)
        return ref, [(located.start, located.end, reference)]


class EmbedsPlace(msgspec.Struct, frozen=True, gc=False):
    """`value` is the part's embeddings: one unnamed field, or an object of `fields`.

    `uuid_value` is the raw value of the part's uuid, `uuid` its string, None if it is not a string.
    """

    modality: Modality
    param: str
    value: msgspec.Raw
    fields: dict[str, msgspec.Raw]
    uuid_value: msgspec.Raw
    uuid: str | None

    def extract(
        self, skeleton: Skeleton, reference: bytes, *, salt: str, config: MediaConfig
    ) -> tuple[MediaRef, list[Edit]]:
        # One field above the limit suffices for the error: an object can have a hundred thousand.
        fields = {name: _field(skeleton, value) for name, value in islice(self.fields.items(), MAX_FIELDS + 1)}
        ref = MediaRef(
            self.modality,
            self.param,
            data=read_embeds(fields, self.param, config.max_data_url_bytes),
            salt=salt,
            alias=None if self.uuid is None else Alias(self.uuid, f"{self.modality}_embeds"),
            is_embeds=True,
        )
        return ref, self._edits(skeleton, reference)

    def _edits(self, skeleton: Skeleton, reference: bytes) -> list[Edit]:
        value = skeleton.locate(self.value)
        if self.uuid_value is ABSENT:
            return [(value.start, value.end, b'null,"uuid":' + reference)]
        uuid = skeleton.locate(self.uuid_value)
        return [(value.start, value.end, b"null"), (uuid.start, uuid.end, reference)]


class UuidPlace(msgspec.Struct, frozen=True, gc=False):
    """`uuid` is the string in `uuid_value`; `options` are the members of the object that has no URL."""

    modality: Modality
    param: str
    uuid_value: msgspec.Raw
    uuid: str
    options: ItemOptions | None
    is_embeds: bool

    def extract(
        self, skeleton: Skeleton, reference: bytes, *, salt: str, config: MediaConfig
    ) -> tuple[MediaRef, list[Edit]]:
        io, options = read_options(self.options, self.modality, self.param, config)
        kind = f"{self.modality}_embeds" if self.is_embeds else self.modality
        ref = MediaRef(
            self.modality,
            self.param,
            salt=salt,
            io=io,
            options=options,
            alias=Alias(self.uuid, kind, io, options),
            is_embeds=self.is_embeds,
        )
        located = skeleton.locate(self.uuid_value)
        return ref, [(located.start, located.end, reference)]


#: The URL, the media type, and the bytes: either the URL or the bytes.
_Read = tuple[str | None, str | None, bytes | None]


def _read_base64(located: Located, media_type: str, config: MediaConfig) -> _Read:
    if bytes(located.raw[1 : 1 + len(REFERENCE_SCHEME)]).lower() == REFERENCE_SCHEME.encode():  # never base64
        return plain_url(located), media_type, None
    return None, media_type, decode_base64(located.text(), config.max_data_url_bytes)


def _read_url(located: Located, modality: Modality, config: MediaConfig) -> _Read:
    """Return media type and bytes of a data: URL; any other URL, and the URL of a published image, which the store
    reads."""
    head = located.head()
    if bytes(head[:5]).lower() != b"data:":
        return plain_url(located), None, None
    header, payload = split_located(located, head)
    media_type = parse_header(header)
    if media_type == RDMA_TYPE:
        check_published(modality, config)
        if len(payload) > MAX_URL_BYTES:
            raise MediaTooLarge(f"the description of a published image has more than {MAX_URL_BYTES} bytes")
        return plain_url(located), None, None
    is_frames = modality == "video" and media_type == "video/jpeg"
    return None, media_type, (read_jpeg_frames if is_frames else decode_base64)(payload, config.max_data_url_bytes)


def split_located(located: Located, head: bytes | memoryview) -> tuple[bytes, memoryview]:
    """Return header and payload of a data: URL, without a copy if the payload was cut."""
    if located.payload and bytes(head).find(b",") == len(head) - 1:
        return bytes(head[:-1]), located.payload
    return split_data_url(located.text())


def plain_url(located: Located) -> str:
    try:
        url = str(located.text(), "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidMediaUrl(NOT_TEXT) from error
    if url[: len(REFERENCE_SCHEME)].lower() == REFERENCE_SCHEME:
        if not is_leased(url):
            raise InvalidMediaUrl(f"{REFERENCE_SCHEME} URLs are reserved for the gateway, but for {MEDIA_SCHEME}HASH")
        leased_hash(url)
    return url


def _field(skeleton: Skeleton, field: msgspec.Raw) -> bytes | memoryview | msgspec.Raw:
    """Return the text of a string (base64); any other value unchanged."""
    return skeleton.locate(field).text() if first_byte(field) == QUOTE else field


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

#: Most characters of a client's key in an error.
_MAX_KEY_CHARS = 64

_Item = TypeVar("_Item", bound=msgspec.Struct)


def decode_item(value: msgspec.Raw, decoder: msgspec.json.Decoder[_Item], param: str) -> _Item:
    """Decode the object of a media item as a struct that forbids unknown fields, its fields raw. Raises as
    `known_members`."""
    try:
        return decoder.decode(value)
    except msgspec.ValidationError:
        known_members(value, decoder.type.__struct_fields__, param)
        raise


def known_members(value: msgspec.Raw, names: Sequence[str], param: str) -> dict[str, msgspec.Raw]:
    """Return the members of the object of a media item. Raises InvalidRequest naming a key that is not one of `names`,
    and the exceptions in UNREADABLE."""
    members = decode_members(value)
    for unknown in members.keys() - set(names):
        key = unknown[:_MAX_KEY_CHARS]
        close = get_close_matches(key, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the known ones are {', '.join(names)}"
        raise InvalidRequest(f"unknown key {key} of a media item: {hint}", param=f"{param}.{key}")
    return members


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
    num_frames = read_count(given.num_frames, f"{param}.num_frames")
    if num_frames is not None and num_frames > config.max_sampled_frames:
        message = f"num_frames must be at most {config.max_sampled_frames}"
        raise TooManyFrames(message, param=f"{param}.num_frames")
    max_frames = read_count(given.max_frames, f"{param}.max_frames")
    if max_frames is not None:
        max_frames = min(max_frames, config.max_sampled_frames)
    return _canonical(fps=fps, num_frames=num_frames, max_frames=max_frames)


def _read_pixels(given: ItemOptions, param: str, limit: int) -> bytes:
    max_pixels = read_count(given.max_pixels, f"{param}.max_pixels")
    if max_pixels is not None:
        max_pixels = min(max_pixels, limit)
    min_pixels = read_count(given.min_pixels, f"{param}.min_pixels")
    if min_pixels is not None and min_pixels > (max_pixels or limit):
        message = f"min_pixels must be at most {'max_pixels' if max_pixels else limit}"
        raise InvalidRequest(message, param=f"{param}.min_pixels")
    return _canonical(min_pixels=min_pixels, max_pixels=max_pixels)


def _canonical(**options: float | None) -> bytes:
    return canonical_options({key: value for key, value in options.items() if value is not None})


def read_count(raw: msgspec.Raw, param: str) -> int | None:
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


class References(msgspec.Struct, frozen=True):
    """The references of one request: `prefix`, and the item's number.

    They are the texts by which intake replaces media in a body, and lead back to what the client has sent. A client
    cannot write one: it contains a random text that is chosen after the body was written, for one request. So what a
    reference resolves to has been counted by intake.
    """

    prefix: str

    @classmethod
    def random(cls) -> References:
        return cls(f"{REFERENCE_SCHEME}{secrets.token_urlsafe(_NUM_RANDOM_BYTES)}:")

    def text(self, number: int) -> str:
        return f"{self.prefix}{number}"

    def number(self, text: str) -> int | None:
        """Return the item's number, None if the text is not a reference.

        If a client sends bare base64 (`input_audio`, an Anthropic image), vLLM's app builds a data: URL from its
        replacement: `data:audio/wav;base64,<reference>`.
        """
        if text.startswith("data:"):
            text = text.rpartition(";base64,")[2]
        number = text.removeprefix(self.prefix)
        return int(number) if text.startswith(self.prefix) and number.isdecimal() else None

    def quoting_client(self, document: bytes, refs: Sequence[MediaRef], *, is_error: bool) -> bytes:
        """Return a JSON document with the references in its strings replaced by the start of what the client sent; of
        an error, also without fragments of references, which elsewhere may be a model's words."""
        if is_error:
            document = re.sub(self._fragments(), b"...", document)
        if self.prefix.encode() not in document:
            return document

        def quote(match: re.Match[bytes]) -> bytes:
            number = int(match[1])
            return json.dumps(_quoted(refs[number]))[1:-1].encode() if number < len(refs) else match[0]

        return re.sub(rb"(?:data:[\w/.+-]*;base64,)?%b(\d+)" % re.escape(self.prefix.encode()), quote, document)

    def _fragments(self) -> bytes:
        """Return the expression for what pydantic leaves of a reference where it abridges a value in its middle."""
        size = len(self.prefix)
        heads = "|".join(re.escape(self.prefix[:n]) for n in range(size, _MIN_HEAD - 1, -1))
        tails = "|".join(re.escape(self.prefix[n:]) for n in range(1, size - 1))
        return rf"(?:{heads})\.\.\.(?:(?:{tails})\d+)?|\.\.\.(?:{tails})\d+".encode()


def _quoted(ref: MediaRef) -> str:
    if ref.alias is not None and (ref.is_alias or ref.is_embeds):  # their reference is in the uuid
        text = ref.alias.uuid
    elif ref.data is None:
        text = ref.content or "" if ref.is_feature else ref.url or ""
    else:
        text = f"data:{ref.media_type or ''};base64,{b64encode(ref.data[:_MAX_QUOTED_CHARS]).decode()}"
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}..."
