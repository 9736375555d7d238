"""Extracts the files of a form (`multipart/form-data`): uploads of speech for transcription or translation.

The form is parsed by the library with which the application behind us parses it, so both see the same parts. The
content of a file is replaced by a reference; every other byte is forwarded unchanged.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from medialane.gateway.config import GatewayConfig
from medialane.gateway.intake.extraction import Intake, check_salt, wants_report
from medialane.gateway.intake.skeleton import Buffer, Edit, apply_edits
from medialane.gateway.references import References
from medialane.media import MediaConfig
from medialane.types.errors import EmptyMedia, InvalidUpload, TooManyMediaItems
from medialane.types.media import MediaRef

#: Ours: vLLM's app ignores them.
FIELDS = (b"medialane", b"cache_salt", b"model", b"stream")

#: Most characters of a field's name in an error.
_MAX_NAME_CHARS = 64


class _File(NamedTuple):
    """A file's field name, and the range of its content in the body."""

    name: str
    start: int
    end: int


def is_multipart(content_type: bytes | None) -> bool:
    return content_type is not None and content_type.lower().startswith(b"multipart/")


def extract_files(
    body: Buffer, content_type: bytes, config: MediaConfig, limits: GatewayConfig, *, references: References, size: int
) -> Intake:
    """Extract the files of the form in the first `size` bytes of `body`, and write `references` instead.

    Raises TooManyMediaItems, InvalidUpload, EmptyMedia and InvalidRequest (the field `medialane`, or no `cache_salt`
    although it is required), which name the field, and BodyTooLarge for a form that is too large without its files. A
    body that cannot be parsed is not changed: the application responds to it.
    """
    data = bytes(memoryview(body)[:size])
    edited = partial(apply_edits, memoryview(data), max_bytes=limits.max_text_bytes, without="its files")
    try:
        form = _Form(content_type, data)
    except FormParserError as error:
        return Intake(edited([]), parse_error=str(error))
    files = form.files
    if len(files) > config.max_items:
        message = f"the request has {len(files)} files, more than {config.max_items}"
        raise TooManyMediaItems(message, param=files[config.max_items].name)
    edits: list[Edit] = [(f.start, f.end, references.text(n).encode()) for n, f in enumerate(files)]
    salt = form.fields.get(b"cache_salt", b"").decode("utf-8", "replace")
    if files:
        check_salt(salt, limits)
    refs = tuple(_reference(file, data, salt, config) for file in files)
    report = wants_report(msgspec.Raw(form.fields.get(b"medialane", b"")))
    model, stream = (form.fields.get(name, b"").decode("utf-8", "replace") for name in (b"model", b"stream"))
    return Intake(edited(edits), refs, salt, report=report, model=model or None, stream=stream.lower() == "true")


def form_fields(body: bytes, content_type: bytes) -> list[tuple[str, str]]:
    """Return names and values of a form's parts, with a file's content as its value. Raises
    FormParserError; UnicodeDecodeError for content that is no text."""
    form = _Form(content_type, body)
    files = [(file.name, body[file.start : file.end]) for file in form.files]
    fields = [(name.decode(), value) for name, value in form.others + list(form.fields.items())]
    return [(name, value.decode()) for name, value in [*fields, *files]]


def _reference(file: _File, data: bytes, salt: str, config: MediaConfig) -> MediaRef:
    num_bytes = file.end - file.start
    if not num_bytes:
        raise EmptyMedia("the file is empty", param=file.name)
    if num_bytes > config.max_audio_bytes:
        message = f"the file has {num_bytes} bytes, more than {config.max_audio_bytes}"
        raise InvalidUpload(message, param=file.name)
    return MediaRef("audio", file.name, data=data[file.start : file.end], salt=salt)


class _Form:
    """The files of a form, the values of its fields FIELDS that it has, and its other parts. Raises
    FormParserError."""

    def __init__(self, content_type: bytes, data: bytes) -> None:
        self.files: list[_File] = []
        self.fields: dict[bytes, bytes] = {}
        self.others: list[tuple[bytes, bytes]] = []
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
            self.files.append(_File(name.decode("utf-8", "replace")[:_MAX_NAME_CHARS], *self._range))
            return
        value = self._data[slice(*self._range)]
        if name in FIELDS:
            self.fields[name] = value
        else:
            self.others.append((name, value))
