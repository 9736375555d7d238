"""A request body, typed for the places where media can be, its values left as views of the original bytes."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec.structs import astuple

from medialane.types.errors import InvalidBody

#: The value of a missing member: a sentinel, compared with `is`.
ABSENT = msgspec.Raw()
NULL = msgspec.Raw(b"null")
EMPTY_STRING = msgspec.Raw(b'""')

#: What msgspec raises for bytes that are not JSON of the expected type, invalid UTF-8 and deep nesting included.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

#: First bytes of JSON strings, objects and arrays.
QUOTE, BRACE, BRACKET = b'"{['

#: The beginning of an array whose first element is a string or an array.
_SEVERAL_PROMPTS = re.compile(rb'\[\s*["\[]')

#: JSON values other than objects and arrays.
_Scalar = str | int | float | bool | None


class _Object(msgspec.Struct, gc=False):
    """Any object."""


class Part(msgspec.Struct, gc=False):
    """A content part of a message. In Anthropic's API, `image` has a source, and `tool_result` has parts of its own.

    The members that can contain media come first: those of `core.modalities`, in its order.
    """

    image_url: msgspec.Raw = ABSENT
    image_embeds: msgspec.Raw = ABSENT
    video_url: msgspec.Raw = ABSENT
    video_embeds: msgspec.Raw = ABSENT
    audio_url: msgspec.Raw = ABSENT
    input_audio: msgspec.Raw = ABSENT
    audio_embeds: msgspec.Raw = ABSENT
    source: msgspec.Raw = ABSENT
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

    Media of a prompt of token ids are in `content_parts` (generate), processed items in `features`. Those of structured
    decisions (`questions`) are in lists of URLs, which all belong to one prompt.

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

#: These raise the exceptions in UNREADABLE.
decode_body = msgspec.json.Decoder(RequestBody).decode
decode_string = msgspec.json.Decoder(str).decode
_decode_priority = msgspec.json.Decoder(Annotated[int, msgspec.Meta(ge=-(1 << 31), le=1 << 31)]).decode
decode_values = msgspec.json.Decoder(list[msgspec.Raw]).decode
decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def check_num_parts(body: RequestBody, num_values: int, max_parts: int) -> None:
    """Raise InvalidBody if there are more than `max_parts` messages and parts. `num_values` are the JSON's values."""
    if num_values <= max_parts:
        return
    pending: list[object] = [body.messages, _without_text(body.input), body.content_parts]
    pending += [_without_text(value) for _, value in body.bounded_inputs()]
    num_parts = 0
    for value in pending:
        if isinstance(value, Message):
            pending.append(value.output)
        inner = value.content if isinstance(value, (Message, Part)) else value
        if isinstance(inner, list):
            num_parts += len(inner)
            if num_parts > max_parts:
                raise InvalidBody(f"the request has more than {max_parts} messages and parts")
            pending += inner


def check_num_tools(body: RequestBody, max_tools: int) -> None:
    """Raise InvalidBody if there are more than `max_tools` tools."""
    tools = body.tools if isinstance(body.tools, list) else []
    nested = [tool.tools for tool in tools if isinstance(tool, Tool) and isinstance(tool.tools, list)]
    if len(tools) + sum(map(len, nested)) > max_tools:
        raise InvalidBody(f"the request has more than {max_tools} tools", param="tools")


def check_num_prompts(body: RequestBody, num_values: int, max_prompts: int) -> None:
    """Raise InvalidBody if there are more than `max_prompts` prompts: vLLM's app makes a request of each, on the event
    loop. `num_values` are the JSON's values."""
    if num_values <= max_prompts:
        return
    messages = body.messages if isinstance(body.messages, list) else []
    numbers = {
        "messages": sum(isinstance(conversation, list) for conversation in messages),
        "prompt": _num_prompts(body.prompt),
        "prompt_embeds": _num_prompts(body.prompt_embeds),
        "input": _num_inputs(body.input) if _has_prompts(body.input) else 1,
        "texts": _num_prompts(body.texts),
        "images": _num_prompts(body.images),
    }
    numbers |= {name: _num_inputs(value) for name, value in body.bounded_inputs()}
    for name, number in numbers.items():
        if number > max_prompts:
            raise InvalidBody(f"the request has more than {max_prompts} prompts", param=name)


def num_token_ids(value: object) -> int:
    """Return the number of values in a parsed list of token ids, or in a list of such lists."""
    if not isinstance(value, list):
        return 0
    return sum(1 + len(e) if isinstance(e, list) and _is_ids(e) else isinstance(e, int) for e in value)


def _without_text(inputs: object) -> object:
    """Return a member that may have prompts besides messages without its text and token ids."""
    if not isinstance(inputs, list):
        return inputs
    return [e for e in inputs if not isinstance(e, str | int) and not (isinstance(e, list) and _is_ids(e))]


def _is_ids(values: list[object]) -> bool:
    return all(isinstance(value, int) for value in values)


def _has_prompts(value: object) -> bool:
    """Return whether a parsed list is one of prompts: neither token ids nor messages."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], str | list)


def _num_inputs(value: object) -> int:
    return len(value) if isinstance(value, list) else 1


def _num_prompts(value: msgspec.Raw) -> int:
    """Return the length of a list of strings or lists; 1 for any other value, such as a list of token ids."""
    return len(decode_values(value)) if _SEVERAL_PROMPTS.match(value) else 1


def parts_with_media(content: object) -> list[tuple[int, Part]]:
    """Return the indexed parts of a message's content that can contain media. Text parts are skipped."""
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
    """Return whether the value is a non-empty string."""
    view = memoryview(value)
    return len(view) > 2 and view[0] == QUOTE


def priority_of(value: msgspec.Raw) -> int:
    """Return a request's priority; 0, vLLM's default, for what vLLM does not accept."""
    if value is ABSENT:
        return 0
    try:
        priority: int = _decode_priority(value)
    except msgspec.DecodeError:
        return 0
    return priority


def string_or_none(value: msgspec.Raw) -> str | None:
    return decode_string(value) if first_byte(value) == QUOTE else None
