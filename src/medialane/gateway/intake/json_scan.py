"""Counts the nesting levels and values of a JSON text in one pass before it is parsed, and checks their limits.

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
from medialane.gateway.intake.request_body import BRACKET, RequestBody, first_byte, num_token_ids
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


def check_num_values(body: RequestBody, num_values: int, limits: GatewayConfig) -> None:
    """Raise InvalidBody if there are more values than `limits` allow. Prompts given as token ids have a separate limit:
    they are many, but cheap to parse."""
    if num_values <= _FEW_VALUES:
        return
    num_ids = num_token_ids(body.input)
    for name, value in (("prompt", body.prompt), ("tokens", body.tokens), ("token_ids", body.token_ids)):
        if first_byte(value) == BRACKET:
            num_ids += _num_token_ids(name, value)
    if num_ids > limits.max_token_ids:
        raise InvalidBody(f"the request has more than {limits.max_token_ids} token ids")
    if num_values - num_ids > limits.max_body_values:
        raise _too_many_values(limits)


def warm_up() -> None:
    """Load the compiled loops; takes a second or two."""
    _native()


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


@lru_cache(maxsize=1)
def _native() -> Any:
    """Import lazily: processes that only parse settings do not pay for numba."""
    from medialane.gateway.intake import native_json

    return native_json
