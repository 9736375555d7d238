"""`extract`: cut, count, parse and locate the media of a JSON body, and replace them by references. `extract_files`:
the same for a form (`multipart/form-data`): speech for transcription or translation, or a file to be kept.
`with_pages`: put the pages of documents in their places, once the store has opened them.

A form is parsed by the library with which the application behind us parses it, so both see the same parts. The content
of a file is replaced by a reference; every other byte is forwarded unchanged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgspec
from msgspec.structs import replace
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from medialane.gateway.config import GatewayConfig
from medialane.gateway.intake.documents import PAGE_MARK, SentDocument, document_image, kept_type
from medialane.gateway.intake.limits import REPLACED_SURROGATES, check_counts, make_strict_json, scan_json
from medialane.gateway.intake.places import References
from medialane.gateway.intake.search import Place, decode_body, media_places, priority_of
from medialane.gateway.intake.sent_features import sent_features
from medialane.gateway.intake.skeleton import (
    ABSENT,
    NULL,
    UNREADABLE,
    Buffer,
    Edit,
    Located,
    Skeleton,
    apply_edits,
    as_utf8,
    decode_members,
    string_or_none,
)
from medialane.media import MediaConfig
from medialane.types.errors import (
    BodyTooLarge,
    EmptyMedia,
    InvalidMediaUrl,
    InvalidRequest,
    InvalidUpload,
    MedialaneError,
    TooManyMediaItems,
)
from medialane.types.media import PDF_TYPE, MediaRef, OpenedDocument, naming

_DEFAULTS = GatewayConfig()

_decode_bool = msgspec.json.Decoder(bool).decode

_NOT_UNICODE = "has a lone surrogate, which is not valid Unicode"


class Upload(NamedTuple):
    """A form whose file is to be kept: the file's own name, and the other fields."""

    filename: str
    fields: dict[str, str]


class ExtractedMedia(msgspec.Struct, frozen=True):
    """The media of a body, and what is left of it. Reference n in `body` stands for `refs[n]`. A request keeps of the
    body its size, unless it is recorded (None: intake has not read it).

    `wants_report` is whether the client requests a report on its media; `priority`, `model`, `stream` and `cache_salt`
    are vLLM's fields. `has_id` is whether the client names the request by vLLM's `request_id`.
    `parse_error` is why the body could not be parsed for media, None if it was.

    `documents` are references whose pages are not in the body yet (`with_pages`). `upload` is of a form whose file is
    to be kept.
    """

    refs: tuple[MediaRef, ...] = ()
    body: bytes = b""
    text_bytes: int | None = None
    wants_report: bool = False
    parse_error: str | None = None
    priority: int = 0
    model: str | None = None
    stream: bool = False
    cache_salt: str | None = None
    has_id: bool = False
    documents: tuple[SentDocument, ...] = ()
    upload: Upload | None = None

    def __repr__(self) -> str:
        return f"ExtractedMedia({len(self.body)} bytes, {self.refs})"

    @property
    def num_bytes(self) -> int:
        """Bytes held: the body and the media that were inside it."""
        return len(self.body) + data_bytes(self.refs)


def data_bytes(refs: Sequence[MediaRef]) -> int:
    """Return the size of the media that came with a request. The pages of a document have the same bytes."""
    return sum({id(ref.data): len(ref.data) for ref in refs if ref.data is not None}.values())


def extract(
    body: Buffer,
    config: MediaConfig,
    limits: GatewayConfig = _DEFAULTS,
    *,
    references: References,
    size: int | None = None,
) -> ExtractedMedia:
    """Extract the media of a request body (chat completions, batches of them, responses, Anthropic's messages), and
    write `references` instead.

    The body is the first `size` bytes of `body`, by default all of them.

    Raises TooManyMediaItems, InvalidMediaUrl (a URL in our own scheme), InvalidDataUrl, InvalidBase64, MediaTooLarge,
    EmptyMedia, InvalidEmbeds, InvalidRequest (an option of an item, the member `medialane`, or no `cache_salt` although
    it is required); each names the field.
    Raises InvalidBody for a body whose levels or values are so numerous that parsing it would block the event loop, and
    BodyTooLarge for one that is too large without its media.
    """
    size = len(body) if size is None else size
    if (converted := as_utf8(memoryview(body)[:size])) is not None:
        body, size = converted, len(converted)
    skeleton = Skeleton(body, size)
    scan = scan_json(skeleton.data)
    scan.check(limits)
    if not scan.is_strict:
        make_strict_json(skeleton.data)
    try:
        parsed = decode_body(skeleton.data)
        check_counts(parsed, scan.num_values, limits)
        by_prompt = media_places(parsed)
        features = sent_features(parsed, config)
        cache_salt, model = string_or_none(parsed.cache_salt), string_or_none(parsed.model)
    except UNREADABLE as error:
        return ExtractedMedia((), apply_edits(skeleton.body, [], limits.max_text_bytes), parse_error=str(error))
    _check_num_items(by_prompt, config)
    report = wants_report(parsed.medialane)
    items = _Items()
    for prompt, places in enumerate(by_prompt):
        for place in places:
            items.add(place, prompt, skeleton, references, salt=cache_salt or "", config=config)
    refs, edits = items.refs, items.edits
    if features is not None:
        edits.append(features.edit(skeleton, references, len(refs)))
        refs += [item.extract(skeleton, salt=cache_salt or "", config=config) for item in features.in_order]
    if refs:
        check_salt(cache_salt, limits)
    if not scan.is_strict:
        _check_unicode(refs, cache_salt)
    if parsed.medialane is not ABSENT:
        edits.append((*_member_range(body, skeleton.locate(parsed.medialane)), b""))
    edited = apply_edits(skeleton.body, edits, limits.max_text_bytes)
    return ExtractedMedia(
        tuple(refs),
        edited,
        wants_report=report,
        priority=priority_of(parsed.priority),
        model=model,
        stream=bytes(parsed.stream) == b"true",
        cache_salt=cache_salt,
        has_id=parsed.request_id not in (ABSENT, NULL),
        documents=tuple(items.documents),
    )


class _Items:
    """The items of a body, in order; its documents; and the edits that replace them."""

    def __init__(self) -> None:
        self.refs: list[MediaRef] = []
        self.documents: list[SentDocument] = []
        self.edits: list[Edit] = []

    def add(
        self, place: Place, prompt: int, skeleton: Skeleton, references: References, *, salt: str, config: MediaConfig
    ) -> None:
        """Raises MedialaneError, which names a field."""
        reference = f'"{references.text(len(self.refs))}"'.encode()
        try:
            found, made = place.extract(skeleton, reference, salt=salt, config=config)
            if isinstance(found, MediaRef) and found.media_type == PDF_TYPE:
                document = document_image(skeleton, found, reference, config)
                found, made = document or (replace(found, media_type=None), made)
        except MedialaneError as error:
            raise (error if error.param else error.at(place.param)) from error
        except UNREADABLE as error:
            raise InvalidRequest(f"this cannot be read: {error}", param=place.param) from error
        self.edits += made
        if isinstance(found, SentDocument):
            self.documents.append(replace(found, number=len(self.refs), prompt=prompt))
            found = found.ref
        if found is not None:
            self.refs.append(found)


def with_pages(
    found: ExtractedMedia,
    opened: Sequence[OpenedDocument],
    config: MediaConfig,
    limits: GatewayConfig,
    *,
    references: References,
) -> ExtractedMedia:
    """Return what was extracted with the pages of its documents, opened in the same order, in place of each.

    Raises TooManyMediaItems, and BodyTooLarge for a body that is too large with their texts; each names a document."""
    _check_num_pages(found, opened, config)
    documents = {sent.number: (sent, document) for sent, document in zip(found.documents, opened, strict=True)}
    refs: list[MediaRef] = []
    stand_ins: list[bytes] = []  # what the body has in place of each reference

    def next_reference() -> bytes:
        return f'"{references.text(len(refs))}"'.encode()

    for number, ref in enumerate(found.refs):
        if number not in documents:
            stand_ins.append(next_reference())
            refs.append(ref)
            continue
        sent, document = documents[number]
        parts = sent.form.texts(sent.heading + document.text if document.text else "")
        for page in document.pages:
            text = f"{text}\n" if (text := page.text.strip()) else ""
            parts += sent.form.texts((sent.heading if page is document.pages[0] else "") + text)
            parts.append(sent.form.image % next_reference())
            param, io = f"{ref.param}{PAGE_MARK}{page.io.page}", msgspec.json.encode(page.io)
            refs.append(replace(ref, param=param, content=document.content_hash, io=io))
        stand_ins.append(b",".join(parts))
    pattern = rb'"%b(\d+)"' % re.escape(references.prefix.encode())
    body = re.sub(pattern, lambda match: stand_ins[int(match[1])], found.body)
    if len(body) > limits.max_text_bytes:
        message = f"the request body has {len(body)} bytes with the texts of its documents, more than"
        hint = 'ask for fewer pages, or without "text"'
        raise BodyTooLarge(f"{message} {limits.max_text_bytes}: {hint}", param=found.documents[0].ref.param)
    return replace(found, refs=tuple(refs), body=body, documents=())


def _check_num_pages(found: ExtractedMedia, opened: Sequence[OpenedDocument], config: MediaConfig) -> None:
    """Raise TooManyMediaItems if a prompt has too many pages of documents, or the request too many items."""
    of_prompt, num_items = Counter[int](), len(found.refs) - len(opened)
    for sent, document in zip(found.documents, opened, strict=True):
        of_prompt[sent.prompt] += len(document.pages)
        num_items += len(document.pages)
        if of_prompt[sent.prompt] > config.max_document_pages:
            message = f"the documents have {of_prompt[sent.prompt]} pages, more than {config.max_document_pages}"
        elif num_items > config.max_batch_items:
            message = f"with pages of documents the request has {num_items} media items, more than"
            message = f"{message} {config.max_batch_items}"
        else:
            continue
        raise TooManyMediaItems(f"{message}: ask for fewer of their `pages`", param=sent.ref.param)


def _check_num_items(by_prompt: list[list[Place]], config: MediaConfig) -> None:
    places = list(chain.from_iterable(by_prompt))
    if len(places) > config.max_batch_items:
        message = f"the request has {len(places)} media items, more than {config.max_batch_items}"
        raise TooManyMediaItems(message, param=places[config.max_batch_items].param)
    for prompt in by_prompt:
        if len(prompt) > config.max_items:
            message = f"the request has {len(prompt)} media items, more than {config.max_items}"
            raise TooManyMediaItems(message, param=prompt[config.max_items].param)


def check_salt(cache_salt: str | None, limits: GatewayConfig) -> None:
    """Raise InvalidRequest if a request with media must have a salt, and has none."""
    if limits.require_salt and not cache_salt:
        message = "this server needs a cache_salt in requests with media: a string that only this user's requests have"
        raise InvalidRequest(message, param="cache_salt")


def _check_unicode(refs: list[MediaRef], cache_salt: str | None) -> None:
    """Raise for a lone surrogate in strings that we interpret: strings that differ only in those would be equal."""
    if cache_salt is not None and REPLACED_SURROGATES.search(cache_salt):
        raise InvalidRequest(f"cache_salt {_NOT_UNICODE}", param="cache_salt")
    for ref in refs:
        if ref.url is not None and REPLACED_SURROGATES.search(ref.url):
            raise InvalidMediaUrl(f"the media URL {_NOT_UNICODE}", param=ref.param)
        if ref.alias is not None and REPLACED_SURROGATES.search(ref.alias.uuid):
            raise InvalidRequest(f"the uuid {_NOT_UNICODE}", param=ref.param)


def wants_report(own: msgspec.Raw) -> bool:
    """Return whether the client requests a report by the body's member `medialane`, our extension of the API, which is
    removed before vLLM's app gets the body. Raises InvalidRequest for unknown keys and invalid values."""
    if own in (ABSENT, NULL):
        return False
    try:
        members = decode_members(own)
    except UNREADABLE as error:
        raise InvalidRequest("medialane must be an object", param="medialane") from error
    for name in members:
        if name != "report":
            raise InvalidRequest("the only supported key of medialane is report", param=f"medialane.{name[:64]}")
    try:
        return "report" in members and _decode_bool(members["report"])
    except msgspec.DecodeError as error:
        raise InvalidRequest("report must be true or false", param="medialane.report") from error


def _member_range(body: Buffer, value: Located) -> tuple[int, int]:
    """Return (start, end) of an object's member in the body, including its key and one of the commas around it."""
    start = body.rfind(b'"', 0, body.rfind(b'"', 0, body.rfind(b":", 0, value.start)))
    while body[start - 1 : start].isspace():
        start -= 1
    if body[start - 1 : start] == b",":
        return start - 1, value.end
    end = value.end
    while body[end : end + 1].isspace():
        end += 1
    return start, end + 1 if body[end : end + 1] == b"," else end


#: Most characters of a field's name in an error.
_MAX_NAME_CHARS = 64


class _File(NamedTuple):
    """A file's field name, the range of its content in the body, and its own name."""

    name: str
    start: int
    end: int
    filename: str


def is_multipart(content_type: bytes | None) -> bool:
    return content_type is not None and content_type.lower().startswith(b"multipart/")


def extract_files(
    body: Buffer,
    content_type: bytes,
    config: MediaConfig,
    limits: GatewayConfig,
    *,
    references: References,
    size: int,
    are_kept: bool = False,
) -> ExtractedMedia:
    """Extract the files of the form in the first `size` bytes of `body`, and write `references` instead. They are
    audio, or, if they `are_kept` for later requests, documents and images.

    Raises TooManyMediaItems, InvalidUpload, EmptyMedia, UnsupportedMediaType and InvalidRequest (the field `medialane`,
    or no `cache_salt` although it is required), which name the field, and BodyTooLarge for a form that is too large
    without its files. A body that cannot be parsed is not changed: the application responds to it.
    """
    data = bytes(memoryview(body)[:size])
    edited = partial(apply_edits, memoryview(data), max_bytes=limits.max_text_bytes, without="its files")
    try:
        form = _Form(content_type, data)
    except FormParserError as error:
        return ExtractedMedia((), edited([]), parse_error=str(error))
    files = form.files
    if len(files) > config.max_items:
        message = f"the request has {len(files)} files, more than {config.max_items}"
        raise TooManyMediaItems(message, param=files[config.max_items].name)
    edits: list[Edit] = [(f.start, f.end, references.text(n).encode()) for n, f in enumerate(files)]
    fields = {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in form.fields}
    salt = fields.get("cache_salt", "")
    if files:
        check_salt(salt, limits)
    return ExtractedMedia(
        tuple(_reference(file, data, salt, config, is_kept=are_kept) for file in files),
        edited(edits),
        wants_report=wants_report(msgspec.Raw(fields.get("medialane", "").encode())),
        model=fields.get("model") or None,
        stream=fields.get("stream", "").lower() == "true",
        upload=Upload(files[0].filename if files else "", fields) if are_kept else None,
    )


def form_fields(body: bytes, content_type: bytes) -> list[tuple[str, str]]:
    """Return names and values of a form's parts, with a file's content as its value. Raises
    FormParserError; UnicodeDecodeError for content that is no text."""
    form = _Form(content_type, body)
    files = [(file.name, body[file.start : file.end].decode()) for file in form.files]
    return [*((name.decode(), value.decode()) for name, value in form.fields), *files]


def _reference(file: _File, data: bytes, salt: str, config: MediaConfig, *, is_kept: bool) -> MediaRef:
    num_bytes, most = file.end - file.start, config.max_document_bytes if is_kept else config.max_audio_bytes
    if not num_bytes:
        raise EmptyMedia("the file is empty", param=file.name)
    if num_bytes > most:
        message = f"the file has {num_bytes} bytes, more than {most}"
        raise InvalidUpload(message, param=file.name)
    content = data[file.start : file.end]
    ref = MediaRef("image" if is_kept else "audio", file.name, data=content, salt=salt)
    with naming(ref):
        return replace(ref, media_type=kept_type(content, config)) if is_kept else ref


class _Form:
    """The files of a form, and its other parts, by name. Raises FormParserError."""

    def __init__(self, content_type: bytes, data: bytes) -> None:
        self.files: list[_File] = []
        self.fields: list[tuple[bytes, bytes]] = []
        self._data = data
        self._header = self._value = self._disposition = b""
        self._range = (0, 0)
        boundary = parse_options_header(content_type)[1].get(b"boundary")
        if boundary is None:
            raise FormParserError("the form has no boundary")
        MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._on_field,
                "on_header_value": self._on_value,
                "on_header_end": self._on_header,
                "on_part_data": self._on_data,
                "on_part_end": self._end,
            },
        ).write(data)

    def _begin(self) -> None:
        self._disposition, self._range = b"", (0, 0)

    def _on_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _on_data(self, _data: bytes, start: int, end: int) -> None:
        """Called once per part: the parser gets the whole body at once."""
        self._range = (start, end)

    def _end(self) -> None:
        options = parse_options_header(self._disposition)[1]
        name = options.get(b"name", b"")
        if b"filename" in options:
            field, filename = (text.decode("utf-8", "replace") for text in (name, options[b"filename"]))
            self.files.append(_File(field[:_MAX_NAME_CHARS], *self._range, filename))
        else:
            self.fields.append((name, self._data[slice(*self._range)]))
