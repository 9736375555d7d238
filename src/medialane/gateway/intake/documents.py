"""Files in a body: documents, whose pages become images with their texts; and images and texts that are sent as files.

Theory of operation. What a file is, its first bytes say, not what the client declares: many send a wrong type. An image
becomes an image part, a text a text part, both in the form of the API that the file's part belongs to. A document's
part becomes one reference, until the store has opened it. Then `with_pages` puts in its place, for each page, a part
with the page's text and an image part, and numbers all references anew, in the order of the prompt.

A file's name (Anthropic's `title` and `context`) is the line before its first page, or before its text.

Next to its data a document may have options: `{"type": "file", "file": {"file_data": ..., "pages": "1-3,7", "dpi": 150,
"max_pixels": 1000000, "max_pages": 10, "text": "none"}}`. Unknown keys are errors, as of other items.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from medialane.gateway.intake.places import known_members, plain_url, read_count, split_located
from medialane.gateway.intake.skeleton import (
    ABSENT,
    BRACKET,
    NULL,
    QUOTE,
    Edit,
    Located,
    Skeleton,
    decode_members,
    first_byte,
    is_filled,
    string_or_none,
)
from medialane.media import MediaConfig, decode_base64, is_pdf, parse_header, sniff_image
from medialane.media.config import MAX_DPI
from medialane.types.errors import EmptyMedia, InvalidRequest, MediaTooLarge, UnknownMedia, UnsupportedMediaType
from medialane.types.media import PDF_TYPE, TEXT_TYPE, DocumentOptions, MediaRef
from medialane.types.media_lease import MEDIA_SCHEME, LeasedMedia

#: Of a file of `/v1/files`: what it is, and the hash of its lease.
_FILE_ID = re.compile(r"file-(pdf|text|image)-([0-9a-f]{64})")
_ID_TYPES: Mapping[str, str | None] = {"pdf": PDF_TYPE, "text": TEXT_TYPE, "image": None}
#: White space may precede this; other bytes do in what is declared as PDF only, or a text about PDF would be one.
_PDF_MAGIC, _PDF_HEAD_BYTES = b"%PDF-", 1024
#: Of DOCX, XLSX, PPTX and other archives, and of older Office files.
_OFFICE_MAGIC = (b"PK\3\4", b"\xd0\xcf\x11\xe0")
_MAX_COUNT = 1 << 31  # of an option, to be sent to the store
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".avif", ".bmp")
#: Between the name of a document and of its page in `MediaRef.param`, as in URLs (RFC 8118).
PAGE_MARK = "#page="


class PartForm(NamedTuple):
    """The parts of an API, without their value (a JSON string). `member` is the member of a file's part that has the
    file, empty if that is the part itself."""

    member: str
    text: bytes
    image: bytes

    def texts(self, text: str) -> list[bytes]:
        """Return the part of a text; none for an empty one."""
        return [self.text % msgspec.json.encode(text)] if text else []


_CHAT = (b'{"type":"text","text":%b}', b'{"type":"image_url","image_url":{"url":%b}}')
_RESPONSES = (b'{"type":"input_text","text":%b}', b'{"type":"input_image","detail":"auto","image_url":%b}')
_MESSAGES = (b'{"type":"text","text":%b}', b'{"type":"image","source":{"type":"url","url":%b}}')

#: By the type of the part that is replaced; documents are also sent as images.
_FORMS: Mapping[str, PartForm] = {
    "file": PartForm("file", *_CHAT),
    "image_url": PartForm("image_url", *_CHAT),
    "input_file": PartForm("", *_RESPONSES),
    "input_image": PartForm("image_url", *_RESPONSES),
    "document": PartForm("source", *_MESSAGES),
    "image": PartForm("source", *_MESSAGES),
}


class SentDocument(msgspec.Struct, frozen=True):
    """A document that is to be opened: reference `number` of the body, in its `prompt`, stands for its part. `heading`
    precedes the text of its first page."""

    ref: MediaRef
    options: DocumentOptions
    form: PartForm
    heading: str = ""
    number: int = 0
    prompt: int = 0


#: Of a document, beside its data.
_OPTIONS = ("pages", "dpi", "max_pixels", "max_pages", "text")
#: The members of a file's part, and of Anthropic's block and its source. `format`, `detail` (of OpenAI's own rendering)
#: and `prompt_cache_breakpoint` have no effect here.
_FILE = ("filename", "file_data", "file_id", "format", *_OPTIONS)
_INPUT_FILE = ("type", "file_url", "detail", "prompt_cache_breakpoint", *_FILE)
_BLOCK = ("source", "type", "title", "context", "citations", "cache_control")
_SOURCE = ("type", "media_type", "data", "url", "content", "file_id", *_OPTIONS)

#: What a file is given by: base64 or a data: URL, a URL, its id, or the text itself, a string or a list of blocks.
_Given = Literal["data", "url", "id", "text"]
_GIVEN: Mapping[str, _Given] = {"file_data": "data", "file_url": "url", "file_id": "id"}
#: By the type of a source, the member that has the file.
_SOURCES: Mapping[str, tuple[str, _Given]] = {
    "base64": ("data", "data"),
    "url": ("url", "url"),
    "file": ("file_id", "id"),
    "text": ("data", "text"),
    "content": ("content", "text"),
}
_NO_SOURCE: tuple[str, _Given] = ("", "data")


class _Sent(NamedTuple):
    """What a part has of a file: the `value` by which it is given, and the `members` beside that."""

    heading: str
    given: _Given
    value: msgspec.Raw
    members: Mapping[str, msgspec.Raw]

    def text(self, name: str) -> str | None:
        return string_or_none(self.members.get(name, ABSENT))

    def options(self, param: str) -> DocumentOptions:
        """Raises InvalidRequest naming the key. Whether there are such pages, the store finds out."""
        dpi, max_pixels, max_pages = (
            min(read_count(self.members.get(name, ABSENT), f"{param}.{name}") or 0, _MAX_COUNT)
            for name in ("dpi", "max_pixels", "max_pages")
        )
        if dpi > MAX_DPI:
            raise InvalidRequest(f"dpi must be at most {MAX_DPI}", param=f"{param}.dpi")
        pages, text = self.text("pages"), self.text("text")
        if pages is None and self.members.get("pages", NULL) != NULL:
            raise InvalidRequest('pages must be a string such as "1-3,7"', param=f"{param}.pages")
        if text not in ("none", "before") and self.members.get("text", NULL) != NULL:
            raise InvalidRequest('text must be "none" or "before"', param=f"{param}.text")
        return DocumentOptions(pages or "", dpi, max_pixels, text != "none", max_pages)


class FilePlace(msgspec.Struct, frozen=True, gc=False):
    """The part of a file: `param` is the field of the file in it, or the part itself. `extract` also raises the
    exceptions in UNREADABLE."""

    kind: Literal["file", "input_file", "document"]
    param: str

    def extract(
        self, skeleton: Skeleton, reference: bytes, *, salt: str, config: MediaConfig
    ) -> tuple[MediaRef | SentDocument | None, list[Edit]]:
        form = _FORMS[self.kind]
        path = _path(self.param)
        part = skeleton.value_at(path[:-1] if form.member else path)
        place = skeleton.locate(part)
        sent = self._document(part) if self.kind == "document" else self._file(part)
        heading = f"{sent.heading}\n" if sent.heading else ""
        if sent.given == "text":
            return None, _text_edits(place, skeleton.locate(sent.value), form, heading)
        url, media_type, data = self._content(skeleton, sent, config)
        ref = MediaRef("image", self.param, url, data, media_type, salt)
        if ref.source == "image":
            return ref, [(place.start, place.end, form.image % reference)]
        options = sent.options(self.param)
        if data is not None and media_type == TEXT_TYPE:
            return None, [(place.start, place.end, b"".join(form.texts(heading + text_of(data))))]
        return SentDocument(ref, options, form, heading), [(place.start, place.end, reference)]

    def _file(self, part: msgspec.Raw) -> _Sent:
        is_inside = self.kind == "file"
        value, names = (decode_members(part)["file"], _FILE) if is_inside else (part, _INPUT_FILE)
        members = known_members(value, names, self.param)
        for name, given in _GIVEN.items():
            if is_filled(value := members.get(name, ABSENT)):
                return _Sent(string_or_none(members.get("filename", ABSENT)) or "", given, value, members)
        raise EmptyMedia(f"a file needs {' or '.join(name for name in _GIVEN if name in names)}", param=self.param)

    def _document(self, part: msgspec.Raw) -> _Sent:
        outer = self.param.removesuffix(".source")
        block = known_members(part, _BLOCK, outer)
        source = known_members(block["source"], _SOURCE, self.param)
        citations = {} if (cited := block.get("citations", NULL)) == NULL else decode_members(cited)
        if bytes(citations.get("enabled", NULL)) == b"true":
            message = "citations are not supported: leave them out, or set enabled to false"
            raise InvalidRequest(message, param=f"{outer}.citations")
        heading = "\n".join(filter(None, (string_or_none(block.get(name, ABSENT)) for name in ("title", "context"))))
        name, given = _SOURCES.get(string_or_none(source.get("type", ABSENT)) or "", _NO_SOURCE)
        value = source.get(name, ABSENT)
        if not is_filled(value) and (name != "content" or first_byte(value) != BRACKET):
            message = "a document's source is of type base64, url, text, content or file, with its member"
            raise InvalidRequest(message, param=self.param)
        return _Sent(heading, given, value, source)

    def _content(
        self, skeleton: Skeleton, sent: _Sent, config: MediaConfig
    ) -> tuple[str | None, str | None, bytes | None]:
        """Return URL, media type (PDF_TYPE, TEXT_TYPE, or an image's) and bytes of a file, the URL or the bytes. Raises
        MedialaneError."""
        if sent.given == "id":
            return *uploaded(string_or_none(sent.value) or ""), None
        located = skeleton.locate(sent.value)
        head = located.head()
        if bytes(head[:5]).lower() == b"data:":
            header, payload = split_located(located, head)
            declared: str | None = parse_header(header)
        elif sent.given == "url" or bytes(head[:8]).lower().startswith((b"http://", b"https://")):
            url = plain_url(located)
            path = sent.heading if "." in sent.heading else urlsplit(url).path
            return url, None if path.lower().endswith(_IMAGE_SUFFIXES) else PDF_TYPE, None
        else:
            declared, payload = sent.text("media_type"), memoryview(located.text())
        data = decode_base64(payload, config.max_data_url_bytes)
        return None, _type_of(data, declared, config), data


def document_image(
    skeleton: Skeleton, ref: MediaRef, reference: bytes, config: MediaConfig
) -> tuple[SentDocument, list[Edit]] | None:
    """Return the document that a client has declared and sent as an image; None if it is an image, or not a part of a
    message."""
    *path, member = _path(ref.param)
    is_image = ref.data is not None and _type_of(ref.data, PDF_TYPE, config) != PDF_TYPE
    if is_image or member not in ("image_url", "source"):
        return None
    part = skeleton.value_at(tuple(path))
    form = _FORMS.get(string_or_none(decode_members(part).get("type", ABSENT)) or "image_url")
    if form is None:
        return None
    place = skeleton.locate(part)
    max_pixels = msgspec.json.decode(ref.options, type=DocumentOptions).max_pixels
    bare = msgspec.structs.replace(ref, io=b"{}", options=b"{}", alias=None)
    return SentDocument(bare, DocumentOptions(max_pixels=max_pixels), form), [(place.start, place.end, reference)]


def kept_type(data: bytes, config: MediaConfig) -> str | None:
    """Return PDF_TYPE or TEXT_TYPE for a file that is to be kept for later requests, None for an image. Raises
    MediaTooLarge for a text, UnsupportedMediaType for other files."""
    media_type = _type_of(data, PDF_TYPE if is_pdf(data) else None, config)
    if media_type == TEXT_TYPE and len(text_of(data).encode()) > config.max_document_text_bytes:
        raise MediaTooLarge(f"the text has more than {config.max_document_text_bytes} bytes")
    return media_type


def file_id(media: LeasedMedia) -> str:
    """Return the id of a file of `/v1/files`, which says what it is."""
    kind = next(kind for kind, media_type in _ID_TYPES.items() if media_type in (media.media_type, None))
    return f"file-{kind}-{media.hash}"


def uploaded(name: str) -> tuple[str, str | None]:
    """Return the URL of the file with this id, and its media type, None for an image. Raises UnknownMedia."""
    if (match := _FILE_ID.fullmatch(name)) is None:
        raise UnknownMedia(f"there is no file {name[:100]!r}: send it to /v1/files")
    return f"{MEDIA_SCHEME}{match[2]}", _ID_TYPES[match[1]]


def _path(param: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", param))


def _text_edits(part: Located, text: Located, form: PartForm, heading: str) -> list[Edit]:
    headings = form.texts(heading)
    if text.raw[0] == QUOTE:
        before, after = form.text.split(b"%b")
        return [(part.start, text.start, b",".join([*headings, before])), (text.end, part.end, after)]
    if not bytes(text.raw[1:-1]).strip():
        raise EmptyMedia("the document is empty")
    return [(part.start, text.start + 1, b"".join(each + b"," for each in headings)), (text.end - 1, part.end, b"")]


def _type_of(data: bytes, declared: str | None, config: MediaConfig) -> str | None:
    """Return PDF_TYPE, TEXT_TYPE, or of an image the type that is declared, None if that is of no image. Raises
    UnsupportedMediaType for what is neither a PDF nor an image, and cannot be text."""
    head = data[:_PDF_HEAD_BYTES]
    if head.lstrip(b"\xef\xbb\xbf\0\t\n\f\r ").startswith(_PDF_MAGIC):
        return PDF_TYPE
    try:
        sniff_image(data, config)
    except UnsupportedMediaType as error:
        if head.startswith(_OFFICE_MAGIC):
            message = "Word, Excel and PowerPoint files and archives are not supported: convert it to PDF"
            raise UnsupportedMediaType(message) from error
        return PDF_TYPE if declared == PDF_TYPE else TEXT_TYPE
    except InvalidRequest:  # whoever decodes it says why
        pass
    return declared if declared is not None and declared.startswith("image/") else None


def text_of(data: bytes) -> str:
    """Return the text of a file, without a byte order mark. Raises EmptyMedia, UnsupportedMediaType."""
    if b"\0" not in data:
        try:
            if text := str(data, "utf-8-sig"):
                return text
            raise EmptyMedia("the file is empty")
        except UnicodeDecodeError:
            pass
    raise UnsupportedMediaType("the file is no PDF, no image of a supported type, and no text in UTF-8")
