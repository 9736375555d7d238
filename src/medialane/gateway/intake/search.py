"""A request body, typed for the places where media can be, its values left as views of the original bytes; and the
search for those places (conversations, messages, parts), in order, by the kinds of parts that contain media.

A kind is identified by a member of the part. If vLLM also requires a certain `type`, so do we.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec.structs import astuple

from medialane.gateway.intake.documents import FilePlace
from medialane.gateway.intake.places import (
    EmbedsPlace,
    ItemOptions,
    MediaPlace,
    UuidPlace,
    decode_item,
)
from medialane.gateway.intake.skeleton import (
    ABSENT,
    BRACE,
    BRACKET,
    EMPTY_STRING,
    NULL,
    QUOTE,
    decode_members,
    decode_string,
    decode_values,
    first_byte,
    is_filled,
    string_or_none,
)
from medialane.types.media import MODALITIES, Modality, PartContent
from medialane.types.tensor import UNNAMED

Place = MediaPlace | EmbedsPlace | UuidPlace | FilePlace

#: JSON values other than objects and arrays.
_Scalar = str | int | float | bool | None


class _Object(msgspec.Struct, gc=False):
    """Any object."""


class Part(msgspec.Struct, gc=False):
    """A content part of a message. In Anthropic's API, `image` and `document` have a source, and `tool_result` has
    parts of its own.

    The members that can contain media come first, in the order of `types.media.MODALITIES`.
    """

    image_url: msgspec.Raw = ABSENT
    image_embeds: msgspec.Raw = ABSENT
    video_url: msgspec.Raw = ABSENT
    video_embeds: msgspec.Raw = ABSENT
    audio_url: msgspec.Raw = ABSENT
    input_audio: msgspec.Raw = ABSENT
    audio_embeds: msgspec.Raw = ABSENT
    source: msgspec.Raw = ABSENT
    file: msgspec.Raw = ABSENT
    file_data: msgspec.Raw = ABSENT
    file_url: msgspec.Raw = ABSENT
    file_id: msgspec.Raw = ABSENT
    content: list[Part | list[msgspec.Raw] | _Scalar] | _Object | _Scalar = None
    type: msgspec.Raw = ABSENT
    uuid: msgspec.Raw = ABSENT


class Message(msgspec.Struct, gc=False):
    """A message, or an item of a response's input: a tool's result has its parts in `output`."""

    content: list[Part | list[msgspec.Raw] | _Scalar] | _Object | _Scalar = None
    output: list[Part | list[msgspec.Raw] | _Scalar] | _Object | _Scalar = None


_Conversations = list[Message | list[Message | list[msgspec.Raw] | _Scalar] | _Scalar] | _Object | _Scalar
#: A query or document to score, or a list of them: text, or an object with content.
_Inputs = list[Message | list[msgspec.Raw] | _Scalar] | Message | _Scalar


class Tool(msgspec.Struct, gc=False):
    """A tool; a namespace of the Responses API has tools of its own."""

    tools: list[msgspec.Raw] | _Object | _Scalar = None


#: These members have their defaults in a part that cannot contain media, such as text.
_NUM_HOLDERS = Part.__struct_fields__.index("content") + 1
_HOLDS_NOTHING = astuple(Part())[:_NUM_HOLDERS]


class RequestBody(msgspec.Struct):
    """Chat completions have `messages` (batches: lists of messages), responses have `input`; all may have `tools`.
    Requests for embeddings have either, or text or token ids in `input`; Cohere's have `texts`, `images` or `inputs`.

    Media of a prompt of token ids are in `content_parts` (generate), processed items in `features`. Structured
    decisions (`questions`) have media in lists of URLs, which all belong to one prompt.

    Token ids may be in `prompt` (completions), `tokens` (detokenize), and `token_ids` (generate). Requests to score
    have two of the members INPUTS, `inputs` excepted.
    """

    messages: _Conversations = None
    input: _Conversations = None
    tools: list[Tool | list[msgspec.Raw] | _Scalar] | _Object | _Scalar = None
    prompt: msgspec.Raw = ABSENT
    prompt_embeds: msgspec.Raw = ABSENT
    query: _Inputs = None
    queries: _Inputs = None
    documents: _Inputs = None
    items: _Inputs = None
    data_1: _Inputs = None
    data_2: _Inputs = None
    text_1: _Inputs = None
    text_2: _Inputs = None
    inputs: _Inputs = None
    texts: msgspec.Raw = ABSENT
    images: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    videos: msgspec.Raw = ABSENT
    questions: msgspec.Raw = ABSENT
    content_parts: list[msgspec.Raw] | _Object | _Scalar = None
    features: msgspec.Raw = ABSENT
    tokens: msgspec.Raw = ABSENT
    token_ids: msgspec.Raw = ABSENT
    cache_salt: msgspec.Raw = ABSENT
    priority: msgspec.Raw = ABSENT
    model: msgspec.Raw = ABSENT
    stream: msgspec.Raw = ABSENT
    request_id: msgspec.Raw = ABSENT
    medialane: msgspec.Raw = ABSENT

    def named_inputs(self) -> list[tuple[str, object]]:
        """Return the members INPUTS that the request has, by name."""
        return [(name, value) for name in INPUTS if (value := getattr(self, name)) is not None]

    def bounded_inputs(self) -> list[tuple[str, object]]:
        """Return them for a request that has two of them or `inputs`: one alone has another meaning, such as the
        `documents` of a chat template."""
        inputs = self.named_inputs()
        return inputs if len(inputs) > 1 or self.inputs is not None else []


#: Members with inputs that are encoded or scored one by one.
INPUTS = ("query", "queries", "documents", "items", "data_1", "data_2", "text_1", "text_2", "inputs")

#: Raises the exceptions in UNREADABLE.
decode_body = msgspec.json.Decoder(RequestBody).decode
_decode_priority = msgspec.json.Decoder(Annotated[int, msgspec.Meta(ge=-(1 << 31), le=1 << 31)]).decode


def parts_with_media(content: object) -> list[tuple[int, Part]]:
    """Return the indexed parts of a message's content that can contain media. Text parts are skipped."""
    if not isinstance(content, list):
        return []
    return [
        (j, part)
        for j, part in enumerate(content)
        if isinstance(part, Part) and astuple(part)[:_NUM_HOLDERS] != _HOLDS_NOTHING
    ]


def priority_of(value: msgspec.Raw) -> int:
    """Return a request's priority; 0, vLLM's default, for what vLLM does not accept."""
    if value is ABSENT:
        return 0
    try:
        priority: int = _decode_priority(value)
    except msgspec.DecodeError:
        return 0
    return priority


class _UrlObject(ItemOptions, forbid_unknown_fields=True):
    """`detail` is OpenAI's, `format` is sent by clients that also serve other APIs; neither has an effect in vLLM."""

    url: msgspec.Raw = ABSENT
    detail: msgspec.Raw = ABSENT
    format: msgspec.Raw = ABSENT


class _ContentPart(_UrlObject, forbid_unknown_fields=True):
    """A part of a prompt of token ids."""

    type: msgspec.Raw = ABSENT
    uuid: msgspec.Raw = ABSENT


class _Base64Object(msgspec.Struct, forbid_unknown_fields=True):
    data: msgspec.Raw = ABSENT
    format: msgspec.Raw = ABSENT


class _ImageSource(msgspec.Struct, forbid_unknown_fields=True):
    """The source of an Anthropic image: a URL, base64 data, or the id of a file, which vLLM does not have."""

    type: msgspec.Raw = ABSENT
    url: msgspec.Raw = ABSENT
    data: msgspec.Raw = ABSENT
    media_type: msgspec.Raw = ABSENT
    file_id: msgspec.Raw = ABSENT


_URL_OBJECTS = msgspec.json.Decoder(_UrlObject)
_CONTENT_PARTS = msgspec.json.Decoder(_ContentPart)
_BASE64_OBJECTS = msgspec.json.Decoder(_Base64Object)
_SOURCES = msgspec.json.Decoder(_ImageSource)
_decode_content = msgspec.json.Decoder(Message).decode


class _PartKind(NamedTuple):
    """Parts with a member `name`."""

    name: str
    modality: Modality
    content: PartContent

    @property
    def is_embeds(self) -> bool:
        return self.content == "embeds"

    def read(self, param: str, part: Part, value: msgspec.Raw) -> Place | None:
        """Return the place in the value of the part's member, or None if it has no media."""
        return _READERS[self.content](self, param, part, value)


def media_places(body: RequestBody) -> list[list[Place]]:
    """Return the places of media in a body, for each prompt that has any: a conversation, an input to be encoded or
    scored. Raises the exceptions in UNREADABLE."""
    places = [*_in_conversations("messages", body.messages), *_in_conversations("input", body.input)]
    for name, inputs in body.named_inputs():
        each = enumerate(inputs) if isinstance(inputs, list) else ()
        places += [_in_message(name, inputs), *(_in_message(f"{name}[{i}]", value) for i, value in each)]
    places.append(_in_content_parts(body.content_parts))
    if body.questions is ABSENT:
        places += [[place] for place in _in_urls("image", "images", body.images)]
    else:
        lists = [(modality, traits.url_list) for modality, traits in MODALITIES.items()]
        places.append([place for modality, name in lists for place in _in_urls(modality, name, getattr(body, name))])
    return [prompt for prompt in places if prompt]


def _in_conversations(param: str, messages: object) -> list[list[Place]]:
    """Return the places in a list of messages, or for each of a list of such lists."""
    places: list[list[Place]] = [[]]
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, list):
            places += _in_conversations(f"{param}[{i}]", message)
        else:
            places[0] += _in_message(f"{param}[{i}]", message)
    return places


def _in_message(param: str, message: object) -> list[Place]:
    """Return the places in a message, or in a query or document, which has the same content."""
    if not isinstance(message, Message):
        return []
    members = (("content", message.content), ("output", message.output))
    return [
        place
        for name, parts in members
        for j, part in parts_with_media(parts)
        for place in _in_part(f"{param}.{name}[{j}]", part)
    ]


def _in_urls(modality: Modality, param: str, urls: msgspec.Raw) -> list[Place]:
    """Return the places in a list of URLs, of Cohere's embeddings or of structured decisions."""
    values = decode_values(urls) if first_byte(urls) == BRACKET else []
    return [MediaPlace(modality, f"{param}[{i}]", url) for i, url in enumerate(values) if is_filled(url)]


def _in_content_parts(parts: object) -> list[Place]:
    """Return the places in the parts of a prompt of token ids, which have their URL and their uuid beside the type."""
    places: list[Place] = []
    for i, raw in enumerate(parts if isinstance(parts, list) else ()):
        if first_byte(raw) != BRACE:
            continue
        part_type = decode_members(raw).get("type", ABSENT)
        if (kind := _URL_KINDS.get(string_or_none(part_type) or "")) is None:
            continue
        param = f"content_parts[{i}]"
        part = decode_item(raw, _CONTENT_PARTS, param)
        uuid = string_or_none(part.uuid)
        if is_filled(part.url):
            places.append(MediaPlace(kind.modality, param, part.url, part, uuid))
        elif uuid is not None:
            places.append(UuidPlace(kind.modality, param, part.uuid, uuid, part, is_embeds=False))
    return places


def _in_part(param: str, part: Part) -> list[Place]:
    """Return the places in a part; an item given only by its uuid counts if there are no others."""
    places = _given_places(param, part)
    if part.source is not ABSENT:
        places += _source_places(param, part)
    if not places and (file := _file_place(param, part)) is not None:
        places.append(file)
    if isinstance(part.content, list) and string_or_none(part.type) == "tool_result":
        for j, inner in parts_with_media(part.content):
            places += _in_part(f"{param}.content[{j}]", inner)
    if not places and part.uuid is not ABSENT and (named := _uuid_place(param, part)) is not None:
        places.append(named)
    return places


def _given_places(param: str, part: Part) -> list[Place]:
    """Return the part's places, by the members that identify kinds; more than one only if it has several of them."""
    present = _present(part)
    if len(present) == 1:
        ((kind, value),) = present
        place = kind.read(f"{param}.{kind.name}", part, value)
        return [] if place is None else [place]
    places = (kind.read(f"{param}.{kind.name}", part, value) for kind, value in present if not kind.is_embeds)
    return [place for place in places if place is not None]


def _source_places(param: str, part: Part) -> list[Place]:
    """Return the places of an Anthropic image or document, which may have images itself. Like in vLLM: the source of an
    image is base64 unless its type is `url`, and JPEG unless it has a media type."""
    kind = string_or_none(part.type)
    if first_byte(part.source) != BRACE or kind not in ("image", "document"):
        return []
    if kind == "document":
        inner = _decode_content(part.source).content
        return [
            FilePlace("document", f"{param}.source"),
            *(place for k, each in parts_with_media(inner) for place in _in_part(f"{param}.source.content[{k}]", each)),
        ]
    source = decode_item(part.source, _SOURCES, f"{param}.source")
    if string_or_none(source.type) == "file":
        return [FilePlace("document", f"{param}.source")]
    is_url = string_or_none(source.type) == "url"
    string = source.url if is_url else source.data
    media_type = None if is_url else string_or_none(source.media_type) or "image/jpeg"
    return [MediaPlace("image", f"{param}.source", string, media_type=media_type)] if is_filled(string) else []


def _file_place(param: str, part: Part) -> FilePlace | None:
    if part.file is not ABSENT:
        is_file = first_byte(part.file) == BRACE and string_or_none(part.type) == "file"
        return FilePlace("file", f"{param}.file") if is_file else None
    has_file = part.file_data is not ABSENT or part.file_url is not ABSENT or part.file_id is not ABSENT
    return FilePlace("input_file", param) if has_file and string_or_none(part.type) == "input_file" else None


def _uuid_place(param: str, part: Part) -> Place | None:
    """Return the place of an item given only by its uuid, if its kind is unambiguous."""
    present = _present(part)
    if len(present) != 1 or first_byte(part.uuid) != QUOTE:
        return None
    ((kind, value),) = present
    param, options = f"{param}.{kind.name}", None
    if first_byte(value) == BRACE and kind.content == "url":
        options = decode_item(value, _URL_OBJECTS, param)
        value = options.url
    elif first_byte(value) == BRACE and kind.content == "base64":
        value = decode_item(value, _BASE64_OBJECTS, param).data
    if value not in (ABSENT, NULL, EMPTY_STRING):
        return None
    uuid = decode_string(part.uuid)
    return UuidPlace(kind.modality, param, part.uuid, uuid, options, is_embeds=kind.is_embeds)


def _present(part: Part) -> list[tuple[_PartKind, msgspec.Raw]]:
    values = zip(_KINDS, astuple(part)[: len(_KINDS)], strict=True)
    return [(kind, value) for kind, value in values if value is not ABSENT]


def _read_url(kind: _PartKind, param: str, part: Part, value: msgspec.Raw) -> Place | None:
    options = None
    if first_byte(value) == BRACE:
        options = decode_item(value, _URL_OBJECTS, param)
        value = options.url
    if not is_filled(value):
        return None
    return MediaPlace(kind.modality, param, value, options, string_or_none(part.uuid))


def _read_base64(kind: _PartKind, param: str, part: Part, value: msgspec.Raw) -> Place | None:
    if first_byte(value) != BRACE:
        return None
    item = decode_item(value, _BASE64_OBJECTS, param)
    media_type = f"{kind.modality}/{string_or_none(item.format) or ''}"
    if not is_filled(item.data):
        return None
    return MediaPlace(kind.modality, param, item.data, uuid=string_or_none(part.uuid), media_type=media_type)


def _read_embeds(kind: _PartKind, param: str, part: Part, value: msgspec.Raw) -> Place | None:
    """Return the place of embeddings, if vLLM treats the part as such with and without a uuid."""
    is_declared = string_or_none(part.type) in (None, kind.name) or first_byte(part.uuid) == QUOTE
    if not is_declared or not (is_filled(value) or first_byte(value) == BRACE):
        return None
    fields = {UNNAMED: value} if first_byte(value) == QUOTE else decode_members(value)
    return EmbedsPlace(kind.modality, param, value, fields, part.uuid, string_or_none(part.uuid))


_READERS: Mapping[PartContent, Callable[[_PartKind, str, Part, msgspec.Raw], Place | None]] = {
    "url": _read_url,
    "base64": _read_base64,
    "embeds": _read_embeds,
}

#: In the order of the members of Part, which is the order of places in a part that has several.
_KINDS = tuple(
    _PartKind(name, modality, content)
    for modality, traits in MODALITIES.items()
    for name, content in traits.parts.items()
)
_URL_KINDS = {kind.name: kind for kind in _KINDS if kind.content == "url"}
