"""A request as it is recorded: a line of an OpenAI batch file, whose body has media or stand-ins in place of references
and no secrets, with what the gateway has observed of it."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from blake3 import blake3
from pybase64 import b64encode
from python_multipart.exceptions import FormParserError

from medialane.gateway.intake import form_fields, is_multipart
from medialane.gateway.recording.config import RecordingConfig
from medialane.gateway.recording.redaction import Redaction, without_secrets
from medialane.gateway.recording.stand_in import StandIn, with_media
from medialane.gateway.references import References
from medialane.gateway.requests import RequestRecord, RequestView
from medialane.types.media import MediaRef, MediaSize

#: Raised when a reader of older lines would misunderstand newer ones.
FORMAT = 1
#: Members by which clients tell their users apart.
_USERS = ("user", "safety_identifier", "prompt_cache_key")
_SALT = "cache_salt"
#: Of a prompt without messages, whose beginning tells conversations apart.
_PROMPT_CHARS = 256
#: Of media that are encoded without a pause, in which the event loop waits: 0.1 ms. Divisible by 3, for base64.
_PIECE_BYTES = 384 * 1024


class RecordedItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A media item, and what the gateway did about it."""

    modality: str
    source: str
    outcome: str | None = None
    embedding: str | None = None
    bytes: int | None = None
    tokens: int | None = None


class Observed(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the gateway has observed: `at` is when the request arrived, in seconds since the epoch. `redacted` is what
    was replaced in the body, `media` whether that has the media themselves."""

    at: float
    status: int | None = None
    tenant: str | None = None
    total_ms: float | None = None
    ttft_ms: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int = 0
    items: tuple[RecordedItem, ...] = ()
    media: Literal["hash", "whole"] = "hash"
    redacted: str = "none"
    format: int = FORMAT

    @classmethod
    def of(cls, view: RequestView, *, tenant: str | None, media: Literal["hash", "whole"], redacted: str) -> Observed:
        return cls(
            at=view.received_at,
            status=view.status,
            tenant=tenant,
            total_ms=view.total_ms,
            ttft_ms=view.ttft_ms,
            prompt_tokens=view.prompt_tokens,
            cached_tokens=view.cached_tokens,
            generated_tokens=view.generated_tokens,
            items=tuple(
                RecordedItem(item.modality, item.source, item.outcome, item.embedding, item.bytes, item.tokens)
                for item in view.items
            ),
            media=media,
            redacted=redacted,
        )


class RecordedLine(msgspec.Struct, frozen=True, kw_only=True):
    """`body` of a form is its fields, with each file as `file_url`, as in vLLM's batch files."""

    custom_id: str
    method: Literal["POST"] = "POST"
    url: str
    body: dict[str, Any]
    medialane: Observed


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
        return len(self.body) + sum(len(ref.data) for ref in self.refs if ref.data is not None)

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
        """Return whether this request's conversation is among those that are recorded."""
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
        body = without_secrets(self._parsed)
        if config.redacts_text:
            body = self._redaction.body(body, self._is_reference)
        names = (_SALT, *_USERS) if config.redacts_tenants or config.redacts_text else (_SALT,)
        for name in names:
            if isinstance(value := self._parsed.get(name), str):
                body[name] = self._redaction.name(value)
        tenant = record.tenant
        if tenant is not None and config.redacts_tenants:
            tenant = self._redaction.name(tenant)
        observed = Observed.of(record.view(), tenant=tenant, media=config.media, redacted=config.redact)
        body = with_media(body, self._recorded)
        line = RecordedLine(custom_id=record.id, url=record.path, body=body, medialane=observed)
        return msgspec.json.encode(line) + b"\n"

    def _is_reference(self, text: str) -> bool:
        return self._request.references.number(text) is not None

    def _recorded(self, text: str, is_bare: bool) -> str:
        number = self._request.references.number(text)
        if number is None:
            return text
        ref = self._request.refs[number]
        if self._config.media == "whole":
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

    def _stand_in(self, ref: MediaRef) -> StandIn:
        item = self._request.record.items.get(ref.param)
        content = item.mm_hash if item is not None else ""
        if not content:
            content = blake3(ref.data).hexdigest() if ref.data is not None else f"{ref.url}"
        size, num_bytes = (MediaSize(), len(ref.data or b"")) if item is None else (item.size, item.num_bytes)
        return StandIn.of(ref.modality, self._redaction.name(content), size, num_bytes)


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
