"""Limits of a JSON body: levels and values, counted in one pass before it is parsed, then messages, prompts and tools.

vLLM's app parses and validates a body on the event loop. The time depends on the number of values far more than on
bytes: a value of a list or an object costs 0.1 to 3 us, a message or part 10 us and more. The same holds for memory:
parsed values take fifty times as much as their text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np

from medialane.gateway.config import GatewayConfig
from medialane.gateway.intake.search import Message, Part, RequestBody, Tool
from medialane.gateway.intake.skeleton import BRACKET, decode_values, first_byte
from medialane.types.errors import InvalidBody

#: Longest number or literal. Python rejects integers of more than 4300 digits; parsing a float takes time per digit.
_MAX_BARE_BYTES = 4300

#: Private-use characters that replace lone surrogates in text made strict.
REPLACED_SURROGATES = re.compile("[\ue000-\ue7ff]")

_TokenIds = list[Annotated[int, msgspec.Meta(ge=0)]]
_PROMPTS: tuple[Callable[[msgspec.Raw], list[int] | list[list[int]] | list[str]], ...] = (
    msgspec.json.Decoder(_TokenIds).decode,
    msgspec.json.Decoder(list[_TokenIds]).decode,
    msgspec.json.Decoder(list[str]).decode,
)

#: The beginning of an array whose first element is a string or an array.
_SEVERAL_PROMPTS = re.compile(rb'\[\s*["\[]')

#: Up to this number of values, token ids are not distinguished.
_FEW_VALUES = 1000


class JsonScan(msgspec.Struct, frozen=True):
    """Nesting depth, number of values, and longest number or literal in bytes. `is_strict` is false if the text may
    contain what Python's parser accepts but JSON does not (NaN, Infinity, lone surrogates)."""

    depth: int
    num_values: int
    longest_bare: int
    is_strict: bool

    def check(self, limits: GatewayConfig) -> None:
        """Raise InvalidBody if the text must not be passed to a parser."""
        if self.depth > limits.max_body_depth:
            raise InvalidBody(f"the request's JSON is nested more than {limits.max_body_depth} levels deep")
        if self.longest_bare > _MAX_BARE_BYTES:
            raise InvalidBody(f"the request has a number of more than {_MAX_BARE_BYTES} digits")
        if self.num_values > limits.max_body_values + limits.max_token_ids:
            raise _too_many_values(limits)


def scan_json(text: bytearray) -> JsonScan:
    counts = np.zeros(_native().NUM_COUNTS, np.int64)
    _native().scan(np.frombuffer(text, np.uint8), counts)
    depth, num_values, longest_bare, num_lenient = counts.tolist()
    return JsonScan(depth, num_values, longest_bare, is_strict=not num_lenient)


def make_strict_json(text: bytearray) -> None:
    """Convert the text to strict JSON in place: NaN and Infinity become `{}`, a lone surrogate one of
    `REPLACED_SURROGATES`."""
    _native().make_strict(np.frombuffer(text, np.uint8))


def warm_up() -> None:
    """Load the compiled loops; takes a second or two."""
    _native()


def check_counts(body: RequestBody, num_values: int, limits: GatewayConfig) -> None:
    """Raise InvalidBody if a parsed body has more of anything than `limits` allow. `num_values` are the JSON's values:
    where even these are few, nothing is counted."""
    if num_values > _FEW_VALUES:
        _check_num_values(body, num_values, limits)
    if num_values > limits.max_messages:
        _check_num_parts(body, limits.max_messages)
    _check_num_tools(body, limits.max_tools)
    if num_values > limits.max_prompts:
        _check_num_prompts(body, limits.max_prompts)


def _check_num_values(body: RequestBody, num_values: int, limits: GatewayConfig) -> None:
    """Prompts given as token ids have a separate limit: they are many, but cheap to parse."""
    num_ids = _num_parsed_ids(body.input)
    for name, value in (("prompt", body.prompt), ("tokens", body.tokens), ("token_ids", body.token_ids)):
        if first_byte(value) == BRACKET:
            num_ids += _num_token_ids(name, value)
    if num_ids > limits.max_token_ids:
        raise InvalidBody(f"the request has more than {limits.max_token_ids} token ids")
    if num_values - num_ids > limits.max_body_values:
        raise _too_many_values(limits)


def _too_many_values(limits: GatewayConfig) -> InvalidBody:
    return InvalidBody(f"the request has more than {limits.max_body_values} JSON values")


def _num_token_ids(name: str, value: msgspec.Raw) -> int:
    """Return the number of values in a list of token ids or in a list of such lists; 0 for a list of strings.

    Raises InvalidBody for other lists: vLLM's validation creates several errors per element, which takes 30 us each.
    """
    for decode in _PROMPTS:
        try:
            prompts = decode(value)
        except msgspec.DecodeError:
            continue
        if prompts and isinstance(prompts[0], int):
            return len(prompts)
        return sum(1 + len(e) for e in prompts if isinstance(e, list))
    message = f"{name} must be a string, a list of strings, a list of token ids, or a list of such lists"
    raise InvalidBody(message, param=name)


def _num_parsed_ids(value: object) -> int:
    """Return the number of values in a parsed list of token ids, or in a list of such lists."""
    if not isinstance(value, list):
        return 0
    return sum(1 + len(e) if isinstance(e, list) and _is_ids(e) else isinstance(e, int) for e in value)


def _check_num_parts(body: RequestBody, max_parts: int) -> None:
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


def _check_num_tools(body: RequestBody, max_tools: int) -> None:
    tools = body.tools if isinstance(body.tools, list) else []
    nested = [tool.tools for tool in tools if isinstance(tool, Tool) and isinstance(tool.tools, list)]
    if len(tools) + sum(map(len, nested)) > max_tools:
        raise InvalidBody(f"the request has more than {max_tools} tools", param="tools")


def _check_num_prompts(body: RequestBody, max_prompts: int) -> None:
    """vLLM's app makes a request of each, on the event loop."""
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


@lru_cache(maxsize=1)
def _native() -> Any:
    """Import lazily: processes that only parse settings do not pay for numba."""
    from medialane.gateway.intake import native_json

    return native_json
