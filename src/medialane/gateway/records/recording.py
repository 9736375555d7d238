"""Recording the traffic of a gateway (`--record FILE`), for `medialane compare`.

Theory of operation. The event loop does one thing: when a request has ended, it puts the request's body, as intake has
left it, and its media, which the request held anyway, into a bounded queue; what does not fit is counted and left out.
A thread does the rest, in pieces that never hold the interpreter for long: sampling, redaction, JSON, and one write for
each line, so that several gateways append to one file. Whatever fails there (a full disk, the limit of the file's size)
ends the recording, with a line in the log, and no request notices.

A line is one of OpenAI's batch files (`custom_id`, `method`, `url`, `body`), and has the request's time in the member
`medialane`. No header of a request is ever written. Salts, and if asked for text and names of users, are replaced by
keyed hashes; the key is in a file beside the recording, for it to be continued by other gateways and later runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec
from blake3 import blake3
from pybase64 import b64encode
from python_multipart.exceptions import FormParserError

from medialane.gateway.config import RecordingConfig
from medialane.gateway.intake import data_bytes, form_fields, is_multipart
from medialane.gateway.intake.places import REFERENCE_SCHEME, References
from medialane.gateway.records.record import RequestRecord
from medialane.types.errors import StartupFailed
from medialane.types.media import MediaRef, MediaSize, Modality

logger = logging.getLogger(__name__)

#: Endpoints that `medialane compare` can ask again.
RECORDED_PATHS: Final = frozenset(
    (
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v2/embed",
        "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
        "/v1/audio/transcriptions", "/v1/audio/translations",
    )
)  # fmt: skip
#: Of bodies and media that wait to be written; more are left out.
MAX_PENDING_BYTES: Final = 64 << 20
_MAX_PENDING: Final = 1000
_KEY_BYTES: Final = 32
_CLOSE_S: Final = 3.0
#: Of one call of writev (IOV_MAX).
_MAX_PIECES: Final = 1024
#: Raised when a reader of older lines would misunderstand newer ones.
RECORDING_FORMAT = 1
#: Members by which clients distinguish their users.
_USERS = ("user", "safety_identifier", "prompt_cache_key")
_SALT = "cache_salt"
#: Characters of a prompt without messages: its beginning distinguishes conversations.
_PROMPT_CHARS = 256
#: Of media that are encoded without a pause, in which the event loop waits: 0.1 ms. Divisible by 3, for base64.
_PIECE_BYTES = 384 * 1024
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


class Recorder:
    """One per gateway. `offer` is for the event loop; `close` once no more requests end."""

    def __init__(self, file: int, key: bytes, config: RecordingConfig, *, max_pending_bytes: int) -> None:
        self._file = file
        self._max_pending_bytes = max_pending_bytes
        self._config = config
        self._redaction = Redaction(key)
        self._pending: queue.SimpleQueue[Recordable | None] = queue.SimpleQueue()
        self._pending_bytes = 0
        self._lock = threading.Lock()
        self._has_ended = False
        self._num_written = self._num_left_out = 0
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, config: RecordingConfig, *, max_pending_bytes: int = MAX_PENDING_BYTES) -> Recorder | None:
        """Return the recorder of this configuration; None if there is nothing to record. Raises StartupFailed."""
        if not config.file:
            return None
        try:
            key = _shared_key(Path(f"{config.file}.key"))
            file = os.open(config.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupFailed(f"--record {config.file}: {error.strerror}") from error
        return cls(file, key, config, max_pending_bytes=max_pending_bytes)

    def offer(self, request: Recordable) -> None:
        """Have a request written, unless too much waits for that, or the recording has ended. Does not block."""
        if self._has_ended or request.record.path not in RECORDED_PATHS:
            return
        num_bytes = request.num_bytes
        with self._lock:
            is_full = self._pending_bytes + num_bytes > self._max_pending_bytes or self._pending.qsize() >= _MAX_PENDING
            if not is_full:
                self._pending_bytes += num_bytes
        if is_full:
            self._leave_out("more end than can be written")
        else:
            self._pending.put(request)

    async def close(self) -> None:
        """Write what waits, for a few seconds at most, and close the file. Idempotent."""
        self._pending.put(None)
        await asyncio.to_thread(self._thread.join, _CLOSE_S)

    def _run(self) -> None:
        try:
            while (request := self._pending.get()) is not None:
                self._write(request)
                with self._lock:
                    self._pending_bytes -= request.num_bytes
                del request  # its media must not stay until the next one comes
        except OSError as error:
            logger.error("--record %s: recording has ended: %s", self._config.file, error.strerror)
        except Exception:  # the thread ends with a line in the log, and requests go on
            logger.exception("--record %s: recording has ended", self._config.file)
        finally:
            self._end()

    def _end(self) -> None:
        """Drop what waits, and whatever is still offered."""
        self._has_ended = True
        with suppress(queue.Empty):
            while True:
                self._pending.get_nowait()
        os.close(self._file)
        logger.info("%d requests were recorded, %d left out", self._num_written, self._num_left_out)

    def _write(self, request: Recordable) -> None:
        """Append a request. Raises OSError."""
        if self._has_ended:
            return
        try:
            body = RecordedBody(request, self._redaction, self._config)
            line = body.line() if body.is_sampled() else []
        except (Unrecordable, ValueError, RecursionError) as error:
            self._leave_out(f"of one that cannot be recorded: {error}")
            return
        if not line:
            return
        if os.fstat(self._file).st_size + sum(map(len, line)) > self._config.max_bytes:
            self._has_ended = True
            logger.warning(
                "--record %s: recording has ended: the file has reached --record-max-bytes", self._config.file
            )
            return
        with self._whole_lines():
            _write_all(self._file, line)
        self._num_written += 1

    @contextmanager
    def _whole_lines(self) -> Iterator[None]:
        """If the block fails, end what it has written of a line: other gateways go on after it."""
        before = os.fstat(self._file).st_size
        try:
            yield
        except OSError:
            with suppress(OSError):  # the disk is full
                if os.fstat(self._file).st_size != before:
                    os.write(self._file, b"\n")
            raise

    def _leave_out(self, reason: str) -> None:
        if not self._num_left_out:
            logger.warning("--record %s: requests are left out, the first because %s", self._config.file, reason)
        self._num_left_out += 1


def _write_all(file: int, pieces: Sequence[bytes]) -> None:
    """Write in one call, so that lines of several gateways do not mix; in more if the kernel takes only a part."""
    rest = [memoryview(piece) for piece in pieces]
    while rest:
        num_bytes = os.writev(file, rest[:_MAX_PIECES])
        while rest and num_bytes >= len(rest[0]):
            num_bytes -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][num_bytes:]


def _shared_key(path: Path) -> bytes:
    """Return the key in this file, made by whichever gateway comes first. Raises OSError, StartupFailed."""
    own = path.with_name(f"{path.name}.{os.getpid()}")
    file = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(file, secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):
            os.link(own, path)  # with its content, or not at all
    finally:
        os.close(file)
        own.unlink()
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise StartupFailed(f"{path} is not the key of a recording: it has {len(key)} bytes instead of {_KEY_BYTES}")
    return key


class Unrecordable(Exception):
    """A request that could not be asked again: says why."""


class Recordable(msgspec.Struct, frozen=True):
    """What is needed of a request that has ended: its body without media, these, and the body's content type."""

    body: bytes
    refs: tuple[MediaRef, ...]
    references: References
    content_type: bytes
    record: RequestRecord

    @property
    def num_bytes(self) -> int:
        return len(self.body) + data_bytes(self.refs)

    def parsed(self) -> dict[str, Any]:
        """Return the body, references included; of a form its fields, with the file as `file_url`, as in vLLM's batch
        files. Raises Unrecordable."""
        if is_multipart(self.content_type):
            return self._form()
        try:
            body = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Unrecordable(f"a body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise Unrecordable("a body is not an object")
        return body

    def _form(self) -> dict[str, Any]:
        body: dict[str, Any] = {}
        try:
            for name, value in form_fields(self.body, self.content_type):
                if name == "file":
                    body["file_url"] = value
                elif name.endswith("[]"):
                    body.setdefault(name, []).append(value)
                else:
                    body[name] = value
        except (FormParserError, UnicodeDecodeError) as error:
            raise Unrecordable(f"a form cannot be read: {error}") from error
        return body


class RecordedBody:
    """Makes the line of a request. Raises Unrecordable."""

    def __init__(self, request: Recordable, redaction: Redaction, config: RecordingConfig) -> None:
        if any(ref.is_embeds or ref.is_feature or ref.is_alias for ref in request.refs):
            raise Unrecordable("embeddings, processed items and items given by uuid alone are not in its body")
        self._request = request
        self._redaction = redaction
        self._config = config
        self._parsed = request.parsed()

    def is_sampled(self) -> bool:
        """Return whether this request's conversation is to be recorded."""
        share = self._config.share
        if share >= 1:
            return True
        beginning = "\0".join(_beginning(self._parsed, self._is_reference))
        if not beginning:
            return random.random() < share  # noqa: S311 - a sample
        return int(self._redaction.name(beginning), 16) < share * (1 << 64)

    def line(self) -> list[bytes]:
        """Return the line in pieces: one of dozens of megabytes would hold up the event loop where it is copied."""
        return list(self._with_payloads(self._skeleton()))

    def _skeleton(self) -> bytes:
        """Return the line with the references of media that are to be recorded whole."""
        record, config = self._request.record, self._config
        body, names = without_secrets(self._parsed), [_SALT]
        if config.redact == "text":
            body = self._redaction.body(body, self._is_reference)
            names += _USERS
        for name in names:
            if isinstance(value := self._parsed.get(name), str):
                body[name] = self._redaction.name(value)
        line = {
            "custom_id": record.id,
            "method": "POST",
            "url": record.path,
            "body": with_media(body, self._recorded),
            "medialane": {
                "at": round(record.received_at, 3),
                "status": record.status,
                "media": config.media,
                "redacted": config.redact,
                "format": RECORDING_FORMAT,
            },
        }
        return msgspec.json.encode(line) + b"\n"

    def _is_reference(self, text: str) -> bool:
        return self._request.references.number(text) is not None

    def _recorded(self, text: str, is_bare: bool) -> str:
        number = self._request.references.number(text)
        if number is None:
            return text
        ref = self._request.refs[number]
        if self._config.media == "whole" and ref.source != "document":  # its pages are in the body, not its file
            if ref.data is not None:
                payload = self._request.references.text(number)
                return payload if is_bare else f"data:{ref.media_type or ''};base64,{payload}"
            if ref.url is not None and _is_public(ref.url):
                return ref.url
        return self._stand_in(ref).url

    def _with_payloads(self, skeleton: bytes) -> Iterator[bytes]:
        """Yield the pieces of a line, with base64 in place of references, which no client can have written."""
        at = 0
        for match in re.finditer(rb"%b(\d+)" % re.escape(self._request.references.prefix.encode()), skeleton):
            yield skeleton[at : match.start()]
            at = match.end()
            data = memoryview(self._request.refs[int(match[1])].data or b"")
            for start in range(0, len(data), _PIECE_BYTES):
                yield b64encode(data[start : start + _PIECE_BYTES])
                time.sleep(0)
        yield skeleton[at:]

    def _stand_in(self, ref: MediaRef) -> MediaStandIn:
        item = self._request.record.items.get(ref.param)
        content = item.mm_hash if item is not None else ""
        size, num_bytes = (MediaSize(), len(ref.data or b"")) if item is None else (item.size, item.num_bytes)
        if ref.source == "document":  # each of its pages has all of its bytes
            content, num_bytes = content or f"{ref.content} {ref.io!r}", 0
        elif not content:
            content = blake3(ref.data).hexdigest() if ref.data is not None else f"{ref.url}"
        key = self._redaction.name(content)
        return MediaStandIn(ref.modality, key, size.width, size.height, size.num_frames, size.num_samples, num_bytes)


def _is_public(url: str) -> bool:
    """Return whether a URL has no place for a secret: a signature is in its query."""
    return urlsplit(url).scheme in ("http", "https") and without_secrets(url) == url


def _beginning(body: dict[str, Any], is_reference: Callable[[str], bool]) -> Iterator[str]:
    """Yield what the turns of one conversation have in common: the texts up to the first message of its user."""
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, list) and all(isinstance(each, dict) for each in messages):
        first = next((n for n, each in enumerate(messages) if each.get("role") == "user"), len(messages))
        messages = [each.get("content") for each in islice(messages, first + 1)]
        yield from (text for text in _texts(messages) if not is_reference(text))
    elif (prompt := body.get("prompt", messages)) is not None:
        yield repr(prompt)[:_PROMPT_CHARS]


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            yield from _texts(list(value.values()))
        case list():
            for each in value:
                yield from _texts(each)


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
    `is_reference` stay.

    Each word becomes another of the same length, from a keyed hash of all words before it in its string. So equal
    beginnings stay equal beginnings, which prefix caches depend on, but a word that occurs twice has two replacements:
    they cannot be inferred from how often they occur. What stays are lengths, line breaks, the structure of the JSON,
    and the strings that servers interpret (roles, types, formats, names of functions).
    """

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
    """The URL for media whose size alone is kept: `medialane:sample/image/KEY?width=1024&height=768`. Equal media have
    equal keys, so whatever is made of a stand-in is found in caches where the original was. 0 is unknown. `num_samples`
    are of audio at 16 kHz, `num_bytes` is the size of the file."""

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
