"""A request body, typed for the places where media stand, its values left as views of the bytes they came from."""

from __future__ import annotations

import msgspec
from msgspec.structs import astuple

from medialane.core.errors import InvalidBody

#: What a member is that a request does not have: this object, so that `is` tells.
ABSENT = msgspec.Raw()
NULL = msgspec.Raw(b"null")
EMPTY_STRING = msgspec.Raw(b'""')

#: What msgspec raises for bytes that are not JSON of the wanted form: broken UTF-8 and deep nesting included.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

#: First bytes of a JSON value, which tell what it is.
QUOTE, BRACE, BRACKET = b'"{['

#: Whatever JSON has besides objects and arrays.
_Scalar = str | int | float | bool | None


class _Object(msgspec.Struct, gc=False):
    """Any object."""


class Part(msgspec.Struct, gc=False):
    """A part of a message. Of Anthropic's, `image` has a source, and `tool_result` parts of its own.

    First stands what media can be in.
    """

    image_url: msgspec.Raw = ABSENT
    video_url: msgspec.Raw = ABSENT
    audio_url: msgspec.Raw = ABSENT
    input_audio: msgspec.Raw = ABSENT
    image_embeds: msgspec.Raw = ABSENT
    audio_embeds: msgspec.Raw = ABSENT
    video_embeds: msgspec.Raw = ABSENT
    source: msgspec.Raw = ABSENT
    content: list[Part | list[msgspec.Raw] | _Scalar] | _Object | _Scalar = None
    type: msgspec.Raw = ABSENT
    uuid: msgspec.Raw = ABSENT


class Message(msgspec.Struct, gc=False):
    content: list[Part | list[msgspec.Raw] | _Scalar] | _Object | _Scalar = None


_Messages = list[Message | list[msgspec.Raw] | _Scalar] | _Object | _Scalar
_Conversations = list[Message | list[Message | list[msgspec.Raw] | _Scalar] | _Scalar] | _Object | _Scalar


#: The members of a part that has nothing in which media can be: a part of text.
_NUM_HOLDERS = Part.__struct_fields__.index("content") + 1
_HOLDS_NOTHING = astuple(Part())[:_NUM_HOLDERS]


class RequestBody(msgspec.Struct):
    """A chat completion has messages (a batch of them: lists of messages), a response has input.

    Prompts of token ids: a completion's `prompt`, what is detokenized (`tokens`), what is generated from (`token_ids`).
    """

    messages: _Conversations = None
    input: _Messages = None
    prompt: msgspec.Raw = ABSENT
    tokens: msgspec.Raw = ABSENT
    token_ids: msgspec.Raw = ABSENT
    cache_salt: msgspec.Raw = ABSENT
    medialane: msgspec.Raw = ABSENT


#: These raise what is in UNREADABLE.
decode_body = msgspec.json.Decoder(RequestBody).decode
decode_string = msgspec.json.Decoder(str).decode
decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def check_num_parts(body: RequestBody, num_values: int, max_parts: int) -> None:
    """Raise InvalidBody for more messages and parts than a conversation has, in JSON with so many values."""
    if num_values <= max_parts:
        return
    todo: list[object] = [body.messages, body.input]
    num_parts = 0
    for value in todo:
        found = value.content if isinstance(value, (Message, Part)) else value
        if isinstance(found, list):
            num_parts += len(found)
            if num_parts > max_parts:
                raise InvalidBody(f"the request has more than {max_parts} messages and parts")
            todo += found


def parts_with_media(content: object) -> list[tuple[int, Part]]:
    """The parts of a message's content in which media can be, by their number. Parts of text are passed over."""
    if not isinstance(content, list):
        return []
    return [
        (j, part)
        for j, part in enumerate(content)
        if isinstance(part, Part) and astuple(part)[:_NUM_HOLDERS] != _HOLDS_NOTHING
    ]


def first_byte(value: msgspec.Raw) -> int | None:
    return None if value is ABSENT else memoryview(value)[0]


def is_filled(value: msgspec.Raw) -> bool:
    """Whether the value is a string, and not the empty one."""
    view = memoryview(value)
    return len(view) > 2 and view[0] == QUOTE


def string_or_none(value: msgspec.Raw) -> str | None:
    return decode_string(value) if first_byte(value) == QUOTE else None
