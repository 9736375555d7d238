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

from medialane.gateway.intake.places import decode_item, plain_url, read_count, split_located
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
from medialane.types.errors import EmptyMedia, InvalidRequest, UnknownMedia, UnsupportedMediaType
from medialane.types.media import PDF_TYPE, DocumentOptions, MediaRef
from medialane.types.media_lease import MEDIA_SCHEME, LeasedMedia

#: Types of parts that are files.
FileKind = Literal["file", "input_file", "document"]

#: Of a file of `/v1/files`: what it is, and the hash of its lease.
_FILE_ID = re.compile(r"file-(pdf|image)-([0-9a-f]{64})")
#: White space may precede this; other bytes do in what is declared as PDF only, or a text about PDF would be one.
_PDF_MAGIC, _PDF_HEAD_BYTES = b"%PDF-", 1024
#: Of DOCX, XLSX, PPTX and other archives, and of older Office files.
_OFFICE_MAGIC = (b"PK\3\4", b"\xd0\xcf\x11\xe0")
#: Of an option, to be sent to the store.
_MAX_COUNT = 1 << 31
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".avif", ".bmp")
#: Between the name of a document and of its page in `MediaRef.param`, as in URLs (RFC 8118).
_PAGE_MARK = "#page="


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
    """A document that is to be opened: reference `number` of the body stands for its part. `heading` precedes the text
    of its first page."""

    ref: MediaRef
    options: DocumentOptions
    form: PartForm
    heading: str = ""
    number: int = 0


class _Options(msgspec.Struct):
    """The options of a document as given in the request."""

    pages: msgspec.Raw = ABSENT
    dpi: msgspec.Raw = ABSENT
    max_pixels: msgspec.Raw = ABSENT
    max_pages: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT

    def read(self, param: str) -> DocumentOptions:
        """Raises InvalidRequest naming the key. Values are checked where the document is opened."""
        dpi, max_pixels, max_pages = (
            min(read_count(value, f"{param}.{name}") or 0, _MAX_COUNT)
            for name, value in (("dpi", self.dpi), ("max_pixels", self.max_pixels), ("max_pages", self.max_pages))
        )
        pages = "" if self.pages is ABSENT else string_or_none(self.pages)
        if pages is None:
            raise InvalidRequest('pages must be a string such as "1-3,7"', param=f"{param}.pages")
        text = "before" if self.text is ABSENT else string_or_none(self.text)
        if text not in ("none", "before"):
            raise InvalidRequest('text must be "none" or "before"', param=f"{param}.text")
        return DocumentOptions(pages, dpi, max_pixels, text == "before", max_pages)


class _FileObject(_Options, forbid_unknown_fields=True):
    """`format` is sent by clients that also serve other APIs: the bytes decide."""

    filename: msgspec.Raw = ABSENT
    file_data: msgspec.Raw = ABSENT
    file_id: msgspec.Raw = ABSENT
    format: msgspec.Raw = ABSENT


class _InputFile(_FileObject, forbid_unknown_fields=True):
    """`detail` is OpenAI's, for its own rendering."""

    type: msgspec.Raw = ABSENT
    file_url: msgspec.Raw = ABSENT
    detail: msgspec.Raw = ABSENT
    prompt_cache_breakpoint: msgspec.Raw = ABSENT


class _Source(_Options, forbid_unknown_fields=True):
    type: msgspec.Raw = ABSENT
    media_type: msgspec.Raw = ABSENT
    data: msgspec.Raw = ABSENT
    url: msgspec.Raw = ABSENT
    content: msgspec.Raw = ABSENT
    file_id: msgspec.Raw = ABSENT


class _DocumentBlock(msgspec.Struct, forbid_unknown_fields=True):
    source: msgspec.Raw
    type: msgspec.Raw = ABSENT
    title: msgspec.Raw = ABSENT
    context: msgspec.Raw = ABSENT
    citations: msgspec.Raw = ABSENT
    cache_control: msgspec.Raw = ABSENT


class _Sent(NamedTuple):
    """What a part has of a file: `data` (base64 or a data: URL), a `url`, the id of a `file`, or the `text` itself: a
    string, or a list of blocks."""

    heading: str
    options: _Options
    data: msgspec.Raw = ABSENT
    url: msgspec.Raw = ABSENT
    file: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT
    media_type: str | None = None


_FILES = msgspec.json.Decoder(_FileObject)
_INPUT_FILES = msgspec.json.Decoder(_InputFile)
_SOURCES = msgspec.json.Decoder(_Source)
_DOCUMENTS = msgspec.json.Decoder(_DocumentBlock)


class FilePlace(msgspec.Struct, frozen=True, gc=False):
    """The part of a file: `param` is the field of the file in it, or the part itself. `extract` also raises the
    exceptions in UNREADABLE."""

    kind: FileKind
    param: str

    def extract(
        self, skeleton: Skeleton, reference: bytes, *, salt: str, config: MediaConfig
    ) -> tuple[MediaRef | SentDocument | None, list[Edit]]:
        form = _FORMS[self.kind]
        part = _part_of(skeleton, self.param, form)
        place = skeleton.locate(part)
        sent = self._sent(part)
        heading = f"{sent.heading}\n" if sent.heading else ""
        if sent.text is not ABSENT:
            return None, _text_edits(place, skeleton.locate(sent.text), form, heading)
        url, media_type, data = self._content(skeleton, sent, config)
        kind = _named_kind(url or "", media_type, sent.heading) if data is None else _kind_of(data, media_type, config)
        if kind == "image":
            is_typed = media_type is not None and media_type.startswith("image/")
            ref = MediaRef("image", self.param, url, data, media_type if is_typed else None, salt)
            return ref, [(place.start, place.end, form.image % reference)]
        options = sent.options.read(self.param)
        if data is not None and kind == "text":
            return None, [(place.start, place.end, b"".join(form.texts(heading + _text_of(data))))]
        ref = MediaRef("image", self.param, url, data, PDF_TYPE, salt)
        return SentDocument(ref, options, form, heading), [(place.start, place.end, reference)]

    def _sent(self, part: msgspec.Raw) -> _Sent:
        """Raises InvalidRequest, and the exceptions in UNREADABLE."""
        if self.kind == "document":
            return self._document(part)
        if self.kind == "input_file":
            given: _FileObject = decode_item(part, _INPUT_FILES, self.param)
        else:
            given = decode_item(decode_members(part)["file"], _FILES, self.param)
        url = given.file_url if isinstance(given, _InputFile) else ABSENT
        return _Sent(string_or_none(given.filename) or "", given, given.file_data, url, given.file_id)

    def _document(self, part: msgspec.Raw) -> _Sent:
        outer = self.param.removesuffix(".source")
        document = decode_item(part, _DOCUMENTS, outer)
        source = decode_item(document.source, _SOURCES, self.param)
        citations = {} if document.citations in (ABSENT, NULL) else decode_members(document.citations)
        if bytes(citations.get("enabled", NULL)) == b"true":
            message = "citations are not supported: leave them out, or set enabled to false"
            raise InvalidRequest(message, param=f"{outer}.citations")
        heading = "\n".join(filter(None, (string_or_none(document.title), string_or_none(document.context))))
        match string_or_none(source.type):
            case "base64":
                return _Sent(heading, source, data=source.data, media_type=string_or_none(source.media_type))
            case "url":
                return _Sent(heading, source, url=source.url)
            case "file":
                return _Sent(heading, source, file=source.file_id)
            case "text" if is_filled(source.data):
                return _Sent(heading, source, text=source.data)
            case "content" if is_filled(source.content) or first_byte(source.content) == BRACKET:
                return _Sent(heading, source, text=source.content)
        message = "a document's source is of type base64, url, text, content or file, with its member"
        raise InvalidRequest(message, param=self.param)

    def _content(
        self, skeleton: Skeleton, sent: _Sent, config: MediaConfig
    ) -> tuple[str | None, str | None, bytes | None]:
        """Return URL, media type and bytes of a file, the URL or the bytes. Raises MedialaneError."""
        if is_filled(sent.file):
            return *uploaded(string_or_none(sent.file) or ""), None
        value = sent.data if is_filled(sent.data) else sent.url
        if not is_filled(value):
            names = {"file": "file_data or file_id", "input_file": "file_data, file_url or file_id"}
            raise EmptyMedia(f"a file needs {names.get(self.kind, 'data')}", param=self.param)
        located = skeleton.locate(value)
        head = located.head()
        if bytes(head[:5]).lower() == b"data:":
            header, payload = split_located(located, head)
            return None, parse_header(header), decode_base64(payload, config.max_data_url_bytes)
        if value is sent.url or bytes(head[:8]).lower().startswith((b"http://", b"https://")):
            return plain_url(located), None, None
        return None, sent.media_type, decode_base64(located.text(), config.max_data_url_bytes)


def document_image(skeleton: Skeleton, ref: MediaRef, reference: bytes) -> tuple[SentDocument, list[Edit]] | None:
    """Return the document that a client has declared and sent as an image; None if it is not a part of a message."""
    *path, member = _path(ref.param)
    if member not in ("image_url", "source"):
        return None
    kind = string_or_none(decode_members(skeleton.value_at(tuple(path))).get("type", ABSENT)) or "image_url"
    if (form := _FORMS.get(kind)) is None:
        return None
    place = skeleton.locate(skeleton.value_at(tuple(path)))
    max_pixels = msgspec.json.decode(ref.options, type=DocumentOptions).max_pixels
    bare = msgspec.structs.replace(ref, io=b"{}", options=b"{}", alias=None)
    return SentDocument(bare, DocumentOptions(max_pixels=max_pixels), form), [(place.start, place.end, reference)]


def kept_type(data: bytes, config: MediaConfig) -> str | None:
    """Return PDF_TYPE for a document that is to be kept for later requests, None for an image. Raises
    UnsupportedMediaType for other files."""
    kind = _kind_of(data, PDF_TYPE if is_pdf(data) else None, config)
    if kind == "text":
        _text_of(data)
        raise UnsupportedMediaType("only PDF and images are kept: send a text with each request (`file_data`)")
    return PDF_TYPE if kind == "pdf" else None


def file_id(media: LeasedMedia) -> str:
    """Return the id of a file of `/v1/files`, which says what it is."""
    return f"file-{'pdf' if media.modality == 'document' else media.modality}-{media.hash}"


def uploaded(name: str) -> tuple[str, str]:
    """Return the URL of the file with this id, and its media type, as far as that matters. Raises UnknownMedia."""
    if (match := _FILE_ID.fullmatch(name)) is None:
        raise UnknownMedia(f"there is no file {name[:100]!r}: send it to /v1/files")
    return f"{MEDIA_SCHEME}{match[2]}", PDF_TYPE if match[1] == "pdf" else match[1]


def page_param(param: str, page: int) -> str:
    """Return the field of a page, by that of its document."""
    return f"{param}{_PAGE_MARK}{page}"


def page_of(param: str) -> tuple[str, int]:
    """Return the field of a document, and the number of its page, of a page's field; 0 for any other field."""
    document, _, number = param.partition(_PAGE_MARK)
    return document, int(number or 0)


def _path(param: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", param))


def _part_of(skeleton: Skeleton, param: str, form: PartForm) -> msgspec.Raw:
    path = _path(param)
    return skeleton.value_at(path[:-1] if form.member else path)


def _text_edits(part: Located, text: Located, form: PartForm, heading: str) -> list[Edit]:
    """Return the edits that leave of a part a heading and its text, or its blocks, whose bytes stay."""
    headings = form.texts(heading)
    if text.raw[0] == QUOTE:
        before, after = form.text.split(b"%b")
        return [(part.start, text.start, b",".join([*headings, before])), (text.end, part.end, after)]
    if not bytes(text.raw[1:-1]).strip():
        raise EmptyMedia("the document is empty")
    return [(part.start, text.start + 1, b"".join(each + b"," for each in headings)), (text.end - 1, part.end, b"")]


def _named_kind(url: str, media_type: str | None, name: str) -> Literal["pdf", "image"]:
    """Return what is behind a URL: a document, unless the file's name, or the URL's path, is an image's."""
    path = name if "." in name else urlsplit(url).path
    return "image" if media_type == "image" or path.lower().endswith(_IMAGE_SUFFIXES) else "pdf"


def _kind_of(data: bytes, media_type: str | None, config: MediaConfig) -> Literal["pdf", "image", "text"]:
    """Raises UnsupportedMediaType for what is neither a PDF nor an image, and cannot be text."""
    head = data[:_PDF_HEAD_BYTES]
    if head.lstrip(b"\xef\xbb\xbf\0\t\n\f\r ").startswith(_PDF_MAGIC):
        return "pdf"
    try:
        sniff_image(data, config)
        return "image"
    except UnsupportedMediaType:
        pass
    except InvalidRequest:  # whoever decodes it says why
        return "image"
    if head.startswith(_OFFICE_MAGIC):
        raise UnsupportedMediaType("Word, Excel and PowerPoint files and archives are not supported: convert it to PDF")
    return "pdf" if media_type == PDF_TYPE else "text"


def _text_of(data: bytes) -> str:
    """Return the text of a file, without a byte order mark. Raises UnsupportedMediaType."""
    if b"\0" not in data:
        try:
            return str(data, "utf-8-sig")
        except UnicodeDecodeError:
            pass
    raise UnsupportedMediaType("the file is no PDF, no image of a supported type, and no text in UTF-8")
