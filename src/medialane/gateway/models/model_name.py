"""Finds the model's name in a request's body while that arrives, so that what follows the name need not be kept.

Theory of operation. The name is a member of the outermost object, often after megabytes of base64: OpenAI's client
sends `messages` first. So only the outermost level is read token by token, of at most `_MAX_STEPS`. A string is skipped
by searching its closing quote (memchr), what is nested by counting brackets outside of strings in a few passes of numpy
over some kilobytes. Nothing is decoded or validated but keys and values of the outermost object that may be the name:
the gateway reads the body again, and refuses what is not JSON, or a name that is not its own. Of several members
`model` the first one counts, so that the rest can be passed on as it comes.
"""

from __future__ import annotations

import json
import re
from typing import Final

import numpy as np
from numpy.typing import NDArray
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

#: A longer name belongs to no model.
MAX_NAME_BYTES = 4096
#: `model`, if each of its letters is escaped.
_MAX_KEY_BYTES = 30
#: Tokens at the outermost level, four of a member: a request has some dozens of members, vLLM knows a hundred. And
#: parts of a form.
_MAX_STEPS, _MAX_PARTS = 1000, 1000
#: How much of what is nested is read at once: little first, since many values are short.
_LEAST_WINDOW_BYTES, _MOST_WINDOW_BYTES = 256, 16384

_QUOTE, _BACKSLASH = b'"', b"\\"
#: What ends the space before the outermost object, which may begin with a byte order mark.
_START = re.compile(rb"[^ \t\r\n\xef\xbb\xbf]")
_MEMBER = re.compile(rb'["{}\[\]:,]')
#: The rest of a string, without what may be the first half of an escaped character.
_TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_LEVELS: Final = np.zeros(256, np.int64)
for _byte, _level in zip(b"{[}]", (1, 1, -1, -1), strict=True):
    _LEVELS[_byte] = _level


def search_of(content_type: bytes) -> ModelSearch | None:
    """Return the search in a body of this type; what is no form is read as JSON, as vLLM's endpoints do. None for a
    form that has no name."""
    if not content_type.lower().startswith(b"multipart/"):
        return JsonSearch()
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    try:
        return None if boundary is None else FormSearch(boundary)
    except FormParserError:  # too long
        return None


class JsonSearch:
    def __init__(self) -> None:
        self.name: str | None = None
        self.is_over = False
        self._depth = self._num_steps = 0
        self._window_bytes = _LEAST_WINDOW_BYTES
        self._in_string = False
        #: Whether the next byte of the string is escaped.
        self._is_escaped = False
        #: Whether the next string at the outermost level is a key, and whether the last key was `model`.
        self._at_key = False
        self._at_model = False
        #: What was read of a string that is kept, and how much may be.
        self._kept: list[bytes] | None = None
        self._num_left = 0

    def feed(self, piece: bytes) -> None:
        at = 0
        while at < len(piece) and not self.is_over:
            if self._in_string:
                at = self._skip_string(piece, at)
            elif self._depth > 1:
                at = self._skip_nested(piece, at)
            else:
                at = self._next(piece, at)

    def _next(self, piece: bytes, at: int) -> int:
        """Go to the next byte of the outermost level that matters; return where to go on."""
        found = (_MEMBER if self._depth else _START).search(piece, at)
        if found is None:
            return len(piece)
        self._num_steps += 1
        byte = piece[found.start()]
        if self._num_steps > _MAX_STEPS or (not self._depth and byte != ord("{")):
            self.is_over = True
        elif byte == ord(_QUOTE):
            self._open_string()
        elif _LEVELS[byte]:
            self._depth += int(_LEVELS[byte])
            self._at_key = self._depth == 1
            self._window_bytes = _LEAST_WINDOW_BYTES
            self.is_over = not self._depth
        else:
            self._at_key = byte == ord(",")
            self._at_model &= not self._at_key
        return found.end()

    def _skip_nested(self, piece: bytes, at: int) -> int:
        """Go to the end of an object or a list, as far as it is in the next bytes."""
        window = np.frombuffer(piece, np.uint8, min(self._window_bytes, len(piece) - at), at)
        self._window_bytes = min(2 * self._window_bytes, _MOST_WINDOW_BYTES)
        quotes = window == ord(_QUOTE)
        if (slashes := window == ord(_BACKSLASH)).any():
            quotes &= ~_escaped(slashes)
        in_string = np.cumsum(quotes) % 2 == 1
        depths = self._depth + np.cumsum(np.where(in_string, 0, _LEVELS[window]))
        if (ended := depths == 1).any():
            self._depth, self._at_key = 1, False
            return at + int(ended.argmax()) + 1
        self._depth, self._in_string = int(depths[-1]), bool(in_string[-1])
        self._is_escaped = self._in_string and _ends_escaping(piece[at : at + len(window)])
        return at + len(window)

    def _open_string(self) -> None:
        self._in_string = True
        if self._depth == 1 and (self._at_key or self._at_model):
            self._kept, self._num_left = [], _MAX_KEY_BYTES if self._at_key else MAX_NAME_BYTES

    def _skip_string(self, piece: bytes, at: int) -> int:
        end = self._end_of_string(piece, at)
        if self._kept is not None:
            part = piece[at : len(piece) if end < 0 else end]
            self._num_left -= len(part)
            self._kept.append(part[: self._num_left + len(part)])
        if end < 0:
            return len(piece)
        self._in_string = False
        if self._kept is not None:
            self._close_kept(None if self._num_left < 0 else b"".join(self._kept))
        return end + 1

    def _close_kept(self, text: bytes | None) -> None:
        self._kept = None
        if self._at_key:
            self._at_model = text is not None and _decoded(text) == "model"
        else:
            self.name = None if text is None else _decoded(text)
            self.is_over = True

    def _end_of_string(self, piece: bytes, at: int) -> int:
        """Return the position of the closing quote, -1 if it is in a later piece."""
        at += self._is_escaped
        end = piece.find(_QUOTE, at)
        if end >= 0 and _ends_escaping(piece[at:end]):
            found = _TEXT.match(piece, at)
            after = at if found is None else found.end()
            end = after if piece[after : after + 1] == _QUOTE else -1
        self._is_escaped = end < 0 and _ends_escaping(piece[at:])
        return end


def _escaped(slashes: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which bytes are escaped: an odd number of backslashes is before them."""
    places = np.arange(len(slashes))
    num_slashes = places - np.maximum.accumulate(np.where(slashes, -1, places))  # in a row, up to this byte
    return np.concatenate(([False], num_slashes[:-1] % 2 == 1))


def _ends_escaping(text: bytes) -> bool:
    """Return whether the byte after `text` is escaped: an odd number of backslashes precedes it."""
    return (len(text) - len(text.rstrip(_BACKSLASH))) % 2 == 1


def _decoded(text: bytes) -> str | None:
    """Return the value of a JSON string without its quotes; None if it is not one."""
    try:
        value: str = json.loads(b'"' + text + b'"', strict=False)
        value.encode()
    except ValueError:  # a lone surrogate, too
        return None
    return value


class FormSearch:
    def __init__(self, boundary: bytes) -> None:
        self.name: str | None = None
        self.is_over = False
        self._header = self._value = self._disposition = b""
        self._num_parts = 0
        self._kept: bytes | None = None
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._on_field,
                "on_header_value": self._on_value,
                "on_header_end": self._on_header,
                "on_headers_finished": self._on_headers,
                "on_part_data": self._on_data,
                "on_part_end": self._end,
                "on_end": self._finish,
            },
        )

    def feed(self, piece: bytes) -> None:
        try:
            self._parser.write(piece)
        except FormParserError:
            self.is_over = True

    def _begin(self) -> None:
        self._disposition, self._kept = b"", None
        self._num_parts += 1
        self.is_over |= self._num_parts > _MAX_PARTS

    def _on_field(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header + data[start:end])[:MAX_NAME_BYTES]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value = (self._value + data[start:end])[:MAX_NAME_BYTES]

    def _on_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _on_headers(self) -> None:
        options = parse_options_header(self._disposition)[1]
        if not self.is_over and options.get(b"name") == b"model" and b"filename" not in options:
            self._kept = b""

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._kept is not None:
            self._kept = (self._kept + data[start:end])[: MAX_NAME_BYTES + 1]

    def _end(self) -> None:
        if self._kept is not None and not self.is_over:
            self.name = self._kept.decode("utf-8", "replace") if len(self._kept) <= MAX_NAME_BYTES else None
            self.is_over = True

    def _finish(self) -> None:
        self.is_over = True


#: Reads a body in pieces. `name` is None until it is found; after `is_over`, it will not be.
ModelSearch = JsonSearch | FormSearch
