"""Loops over the bytes of a JSON text, compiled by numba when this module is imported (`limits.warm_up`).

Compiled because every body that a client sends is read byte by byte before it is parsed: this takes 800 MB a second,
the same loops in Python 3.5 (on two busy cores). And they release the GIL: in a thread they do not block the event
loop, whatever is sent. They do not validate JSON; that is left to the parsers, which never see more values or levels
than were counted here.

Compiling takes 1.5 s. Numba stores the machine code in `__pycache__`, or in the user's cache; if neither is writable,
each process compiles again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., object])

#: Indices of the counts in the output of `scan`.
DEPTH, VALUES, LONGEST_BARE, LENIENT, NUM_COUNTS = 0, 1, 2, 3, 4

_TEXT = types.Array(types.uint8, 1, "C", readonly=True)
_WRITABLE = types.Array(types.uint8, 1, "C")
_COUNTS = types.Array(types.int64, 1, "C")

_QUOTE, _BACKSLASH, _U, _COMMA, _COLON = 0x22, 0x5C, 0x75, 0x2C, 0x3A
_OPEN_LIST, _OPEN_OBJECT, _CLOSE_LIST, _CLOSE_OBJECT = 0x5B, 0x7B, 0x5D, 0x7D
_SPACE, _MINUS, _LETTER_A, _LETTER_I, _LETTER_N, _LETTER_Y = 0x20, 0x2D, 0x61, 0x49, 0x4E, 0x79
_SMALL_D, _LETTER_E, _DIGIT_0, _DIGIT_8, _DIGIT_9 = 0x64, 0x45, 0x30, 0x38, 0x39
_LOWER = 0x20
#: UTF-8 of a surrogate begins with ED A0 to ED BF.
_ED, _EE, _A0, _BF = 0xED, 0xEE, 0xA0, 0xBF


def _compiled(signature: object) -> Callable[[_F], _F]:
    """Compile a function for one signature, without the GIL: no other thread may change its arrays in the meantime."""

    def compile_function(function: _F) -> _F:
        try:
            compiled: _F = numba.njit(signature, cache=True, nogil=True)(function)
        except RuntimeError:  # numba has found no writable directory
            logger.warning("no writable cache for compiled code (set NUMBA_CACHE_DIR): compiling at each start")
            compiled = numba.njit(signature, nogil=True)(function)
        return compiled

    return compile_function


# ruff: noqa: SIM109 - compiled: a comparison with a tuple would build one


@_compiled(types.int64(_TEXT, types.int64))
def _surrogate(text: NDArray[np.uint8], at: int) -> int:
    """Classify an escape at `at` (`\\uD800` to `\\uDFFF`): 1 for a high surrogate, 2 for a low one, 0 for none."""
    if at + 6 > len(text) or text[at] != _BACKSLASH or text[at + 1] != _U:
        return 0
    second = text[at + 3] | _LOWER if text[at + 3] > _DIGIT_9 else text[at + 3]
    if text[at + 2] | _LOWER != _SMALL_D or second < _DIGIT_8:
        return 0
    return 1 if second <= _DIGIT_9 or second <= _LETTER_A + 1 else 2


@_compiled(types.int64(_TEXT, types.int64))
def _lone_surrogate(text: NDArray[np.uint8], at: int) -> int:
    """Return the length in bytes of a lone surrogate at `at` in a string: 6 (escape), 3 (UTF-8), or 0 if there is none.

    Negative (-12) for a pair of escapes.
    """
    if text[at] == _ED:
        return 3 if at + 2 < len(text) and _A0 <= text[at + 1] <= _BF else 0
    kind = _surrogate(text, at)
    if kind == 1 and _surrogate(text, at + 6) == 2:
        return -12
    return 6 if kind else 0


@_compiled(types.int64(_TEXT, types.int64))
def _word(text: NDArray[np.uint8], at: int) -> int:
    """Return the length of NaN or Infinity at `at`, or 0. Of Infinity, only the first and last letter are compared: the
    application's parser validates the word."""
    if text[at] == _LETTER_N and at + 2 < len(text) and text[at + 1] == _LETTER_A and text[at + 2] == _LETTER_N:
        return 3
    if text[at] == _LETTER_I and at + 7 < len(text) and text[at + 7] == _LETTER_Y:
        return 8
    return 0


@_compiled(types.void(_TEXT, _COUNTS))
def scan(text: NDArray[np.uint8], counts: NDArray[np.int64]) -> None:
    """Count levels, values, and the longest number or literal outside strings. LENIENT counts what Python's parser may
    accept but JSON does not."""
    depth = deepest = values = bare = longest = lenient = 0
    in_string = False
    at = 0
    while at < len(text):
        byte = text[at]
        step = 1
        if in_string:
            if byte == _BACKSLASH or byte == _ED:
                length = _lone_surrogate(text, at)
                lenient += length > 0
                step = abs(length) if length else (2 if byte == _BACKSLASH else 1)
            elif byte == _QUOTE:
                in_string = False
        elif byte <= _SPACE or byte == _COMMA or byte == _COLON:
            values += byte == _COMMA
            bare = 0
        elif byte == _QUOTE:
            in_string, bare = True, 0
        elif byte == _OPEN_LIST or byte == _OPEN_OBJECT:
            depth, values, bare = depth + 1, values + 1, 0
            deepest = max(deepest, depth)
        elif byte == _CLOSE_LIST or byte == _CLOSE_OBJECT:
            depth, bare = depth - 1, 0
        else:
            bare += 1
            longest = max(longest, bare)
            lenient += byte == _LETTER_N or byte == _LETTER_I
        at += step
    counts[DEPTH], counts[VALUES], counts[LONGEST_BARE], counts[LENIENT] = deepest, values, longest, lenient


@_compiled(types.void(_WRITABLE))
def make_strict(text: NDArray[np.uint8]) -> None:
    """Convert to strict JSON without moving bytes: NaN and Infinity become `{}`, which is neither a number nor a
    string, and a lone surrogate U+D800+n becomes the private-use character U+E000+n."""
    in_string = False
    at = 0
    while at < len(text):
        byte = text[at]
        step = 1
        if in_string:
            if byte == _BACKSLASH or byte == _ED:
                length = _lone_surrogate(text, at)
                if length == 3:
                    text[at], text[at + 1] = _EE, text[at + 1] - 0x20
                elif length == 6:
                    second = text[at + 3]
                    text[at + 2] = _LETTER_E
                    text[at + 3] = second - 8 if second <= _DIGIT_9 else (second | _LOWER) - _LETTER_A + 2 + _DIGIT_0
                step = abs(length) if length else (2 if byte == _BACKSLASH else 1)
            elif byte == _QUOTE:
                in_string = False
        elif byte == _QUOTE:
            in_string = True
        else:
            length = _word(text, at)
            if length:
                first = at - 1 if at and text[at - 1] == _MINUS else at
                text[first : at + length] = _SPACE
                text[first], text[first + 1] = _OPEN_OBJECT, _CLOSE_OBJECT
                step = length
        at += step
