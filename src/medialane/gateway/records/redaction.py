"""What a recording has of a request's body: no secrets, of text its shape if asked for, and stand-ins for media.

Theory of operation. Each word becomes another of the same length, from a keyed hash of all words before it in its
string. So equal beginnings stay equal beginnings, which prefix caches depend on, but a word that occurs twice has two
replacements: they cannot be inferred from how often they occur. What stays are lengths, line breaks, the structure of
the JSON, and the strings that servers interpret (roles, types, formats, names of functions).

A stand-in is the URL for media whose size alone is kept: `medialane:sample/image/KEY?width=1024&height=768`.
Equal media have equal keys, so whatever is made of a stand-in is found in caches where the original was.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec
from blake3 import blake3

from medialane.gateway.intake.places import REFERENCE_SCHEME
from medialane.types.media import Modality

#: Languages that do not separate words have long ones.
_WORD = re.compile(r"\w{1,12}")
_LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
#: Names of members whose strings servers interpret.
_KEPT = frozenset(
    (
        "role", "type", "model", "detail", "format", "encoding_format", "required", "tool_choice", "reasoning_effort",
        "effort", "service_tier", "response_format", "truncation", "media_type", "language", "status", "object",
        "modalities", "task", "$ref", "pattern", "regex", "grammar", "guided_regex", "guided_grammar", "chat_template",
    )
)  # fmt: skip
#: Members that are no text to be resembled, but would not parse if they were changed.
_EMPTIED = {"arguments": "{}", "partial_json": "{}"}
#: Of a member anywhere but among the properties of a schema: it is left out.
_SECRET = re.compile(
    r"(proxy[-_]?)?authorization|(x[-_])?api[-_]?key|cookie|password|passwd|(client[-_]?)?secret"
    r"|((access|auth|bearer|refresh|id)[-_]?)token|credentials?|headers",
    re.IGNORECASE,
)
#: Of a URL anywhere in a string: a password, and a query or a fragment, which have signatures and tokens. A fragment
#: that is a path points into a schema. Linear: what may repeat ends where the next part begins.
_URL = re.compile(r"""://(?:[^\s/?#"'<>]*@)?([^\s?#"'<>]*)(?:\?[^\s"'<>\\]*|\#(?!/)[^\s"'<>\\]+)?""")
#: Members with the URL of a service, whose path may be its key.
_SERVICE = re.compile(r".{0,64}(server|connector|webhook|callback|endpoint)(_ur[il])?", re.IGNORECASE)
_ORIGIN = re.compile(r"(?:[\w+.-]{1,32}://)?[^/]*")
_SCHEMA_NAMES = ("properties", "$defs", "definitions")
#: Each model's vocabulary has these, and they are no special tokens.
_FIRST_TOKEN, _NUM_TOKENS = 100, 900
#: Words after which the thread offers the interpreter to others: some 0.3 ms.
_WORDS_IN_ROW = 200


def without_secrets(value: Any, *, is_schema: bool = False) -> Any:
    """Return JSON without members that are named like secrets, and URLs without theirs: tools of other servers have
    headers and keys, files have signed URLs."""
    if isinstance(value, str):
        return _URL.sub(r"://\1", value) if "://" in value else value
    if isinstance(value, list):
        return [without_secrets(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _origin(each)
        if isinstance(each, str) and _SERVICE.fullmatch(name)
        else without_secrets(each, is_schema=name in _SCHEMA_NAMES)
        for name, each in value.items()
        if is_schema or not _SECRET.fullmatch(name)
    }


def _origin(url: str) -> str:
    found = _ORIGIN.match(without_secrets(url))
    return found[0] if found else ""


class Redaction:
    """Replaces text by text that has nothing of it but the length, the same for the same `key`. Strings that
    `is_reference` stay."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._num_words = 0

    def name(self, text: str) -> str:
        """Return what stands for a name."""
        return blake3(text.encode("utf-8", "surrogatepass"), key=self._key).hexdigest(length=8)

    def body(self, body: dict[str, Any], is_reference: Callable[[str], bool]) -> dict[str, Any]:
        return {name: self._value(name, value, is_reference) for name, value in body.items()}

    def text(self, text: str) -> str:
        chain = blake3(key=self._key)

        def other(word: re.Match[str]) -> str:
            self._pause()
            chain.update(word[0].encode("utf-8", "surrogatepass") + b"\0")
            return "".join(_LETTERS[byte % len(_LETTERS)] for byte in chain.digest(length=len(word[0])))

        return _WORD.sub(other, text)

    def _value(self, name: str, value: Any, is_reference: Callable[[str], bool]) -> Any:
        match value:
            case str() if name in _EMPTIED:
                return _EMPTIED[name]
            case str():
                return value if name in _KEPT or is_reference(value) else self.text(value)
            case dict():
                return self.body(value, is_reference)
            case [int(), *_] if all(type(each) is int for each in value):
                return list(self._tokens(value))
            case list():
                return [self._value(name, each, is_reference) for each in value]
            case _:
                return value

    def _tokens(self, token_ids: list[int]) -> Iterator[int]:
        chain = blake3(key=self._key)
        for token_id in token_ids:
            self._pause()
            chain.update(token_id.to_bytes(8, "little", signed=True))
            yield _FIRST_TOKEN + int.from_bytes(chain.digest(length=4), "little") % _NUM_TOKENS

    def _pause(self) -> None:
        self._num_words += 1
        if self._num_words % _WORDS_IN_ROW == 0:
            time.sleep(0)


SAMPLE_SCHEME = f"{REFERENCE_SCHEME}sample/"
_PATTERN = re.compile(rf"{SAMPLE_SCHEME}(image|video|audio)/([0-9a-f]{{1,64}})(?:\?(.*))?")
#: The only member that has bare base64 (`intake.places.MediaPlace`); elsewhere media are URLs.
_BARE = "data"
_MEMBERS = ("width", "height", "num_frames", "num_samples", "num_bytes")
#: What a number in a file may be at most: a line must not have compare fill the memory.
_MOST = 1 << 30


class MediaStandIn(msgspec.Struct, frozen=True):
    """Media of this key and size; 0 is unknown. `num_samples` are of audio at 16 kHz, `num_bytes` is the size of the
    file."""

    modality: Modality
    key: str
    width: int = 0
    height: int = 0
    num_frames: int = 0
    num_samples: int = 0
    num_bytes: int = 0

    @property
    def url(self) -> str:
        known = {name: value for name in _MEMBERS if (value := getattr(self, name))}
        return f"{SAMPLE_SCHEME}{self.modality}/{self.key}" + (f"?{urlencode(known)}" if known else "")


def with_media(value: Any, other: Callable[[str, bool], str], name: str = "") -> Any:
    """Return JSON in which each string is replaced by `other(text, is_bare)`. Where it `is_bare`, media are base64
    without a `data:` URL around it."""
    match value:
        case str():
            return other(value, name == _BARE)
        case dict():
            return {key: with_media(each, other, key) for key, each in value.items()}
        case list():
            return [with_media(each, other, name) for each in value]
        case _:
            return value


def parse_stand_in(url: str) -> MediaStandIn | None:
    """Return the stand-in of a recorded URL, None for any other string. Raises ValueError."""
    if not url.startswith(SAMPLE_SCHEME):
        return None
    match = _PATTERN.fullmatch(url)
    if match is None:
        raise ValueError(f"{url[:100]} names no media")
    sizes = {name: int(value) for name, value in parse_qsl(match[3] or "") if name in _MEMBERS}
    if any(not 0 <= value <= _MOST for value in sizes.values()):
        raise ValueError(f"{url[:100]} has no usable size")
    return msgspec.convert({"modality": match[1], "key": match[2], **sizes}, MediaStandIn)
