"""Opens PDF documents with PDFium, and renders their pages.

Untrusted bytes, so `open_document`, `check_document` and `render_page` run in a preparer only; elsewhere the library is
at most loaded. It executes no script of a document, fetches nothing, and has only its own fonts for those that a
document does not embed: whatever machine renders it, a page has the same pixels.

A page is identified by a digest of itself, of all objects that it refers to (PDFium writes them as a document of one
page, without decoding them), so that another edition of a document renders only what is new. Fields of forms and
optional content also depend on the rest of the document: then the digest is of the whole.

`pypdfium2_raw` is PDFium's C interface for ctypes; its return values are checked here.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from blake3 import blake3

from medialane.media.config import MediaConfig
from medialane.media.image_header import check_limits
from medialane.types.errors import (
    EmptyMedia,
    InvalidDocument,
    InvalidRequest,
    MediaTooLarge,
    TooManyPages,
    Unavailable,
    UnsupportedMediaType,
)
from medialane.types.media import PDF_TYPE, DocumentOptions, DocumentPage, Image, OpenedDocument, PageIo

POINTS_PER_INCH = 72

#: PDFium, like other readers, accepts bytes before the file's first ones.
_HEAD_BYTES = 1024

_MAX_RANGES_CHARS = 256
_RANGE = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", re.ASCII)

#: Pages are digested until this many times the document's bytes were written: documents whose pages share all their
#: resources would be written once for each.
_MAX_WRITTEN = 2
_MIN_WRITTEN_BYTES = 1 << 20

#: What depends on more than the page: optional content (its dictionaries may have no type) and fields of forms.
_DEPENDENT = re.compile(rb"/(?:OC(?:G|MD)?|Properties|Widget)[\s/<(\[]")

#: Of a document of one page: PDFium's catalog, page tree and information, with the time, come before the page,
#: whose objects end at the table of all.
_FIRST_OBJECT, _TABLE = b"\n4 0 obj", b"xref\r\n0 "

#: `FPDF_FILEWRITE.WriteBlock`.
_WRITE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulong)

_DAMAGED = "the document is damaged and cannot be opened"

_MESSAGES = {
    "FPDF_ERR_PASSWORD": "the document is encrypted, and opens with a password only: send it without one",
    "FPDF_ERR_SECURITY": "the document is encrypted in a way that this server does not support: send it unencrypted",
}


def load_pdfium() -> Any:
    """Load the library, and do not initialise it. Raises UnsupportedMediaType."""
    try:
        return importlib.import_module("pypdfium2_raw")
    except (ImportError, OSError) as error:
        raise UnsupportedMediaType("this server does not support documents: it has no decoder for PDF") from error


def sniff_document(data: bytes | bytearray | memoryview, config: MediaConfig) -> str:
    """Return PDF_TYPE. Raises EmptyMedia, MediaTooLarge, UnsupportedMediaType."""
    if not data:
        raise EmptyMedia("the document is empty")
    if len(data) > config.max_document_bytes:
        raise MediaTooLarge(f"the document has {len(data)} bytes, more than {config.max_document_bytes}")
    if not is_pdf(data):
        raise UnsupportedMediaType("the document is not a PDF: convert it to one")
    return PDF_TYPE


def is_pdf(data: bytes | bytearray | memoryview) -> bool:
    """Return whether the bytes begin like a PDF document."""
    return b"%PDF-" in bytes(data[:_HEAD_BYTES])


def check_document(data: memoryview) -> None:
    """Open the document. Raises InvalidDocument."""
    with _Document.open(data):
        pass


def open_document(data: memoryview, content: str, options: DocumentOptions, config: MediaConfig) -> OpenedDocument:
    """Return a document, whose content hash is given, with the pages that are wanted. Nothing is rendered.

    Raises InvalidDocument, InvalidRequest for options that make no sense, TooManyPages, MediaTooLarge for too much
    text.
    """
    with _Document.open(data) as document:
        wanted = pages_wanted(options, document.num_pages, config)
        digests = document.digests(content, wanted)
        room, pages = config.max_document_text_bytes, []
        for number in wanted:
            width, height = _pixels(document.size(number), options, config)
            text = document.text(number) if options.text else ""
            if (room := room - len(text.encode())) < 0:
                message = f"the text of the document's pages has more than {config.max_document_text_bytes} bytes"
                raise MediaTooLarge(f"{message}: choose fewer pages, or none of their text")
            pages.append(DocumentPage(PageIo(digests[number], height, number, renderer(), width), text))
        return OpenedDocument(content, document.num_pages, tuple(pages))


def render_page(data: memoryview, page: PageIo, config: MediaConfig) -> Image:
    """Return the pixels of a page, with annotations and the fields of forms as a viewer draws them. Raises
    InvalidDocument, ImageTooLarge; Unavailable if another release has opened the document."""
    if page.renderer != renderer():
        raise Unavailable("the document was opened by another release of this server: send the request again")
    check_limits(page.width, page.height, config)
    with _Document.open(data) as document:
        return Image(document.render(page.page, page.width, page.height))


def pages_wanted(options: DocumentOptions, num_pages: int, config: MediaConfig) -> list[int]:
    """Return the numbers of the pages, from 1, ascending. Raises InvalidRequest, TooManyPages."""
    most = min(options.max_pages or config.max_document_pages, config.max_document_pages)
    ranges = _ranges(options.pages, num_pages)
    wanted = {number for first, last in ranges for number in range(first, min(last, first + most) + 1)}
    if len(wanted) > most:
        what = f"pages {options.pages} of the document are" if options.pages else f"the document has {num_pages} pages"
        raise TooManyPages(f"{what}, more than {most}: choose some by `pages`")
    return sorted(wanted)


def _ranges(pages: str, num_pages: int) -> Iterator[tuple[int, int]]:
    if not pages:
        yield 1, num_pages
        return
    if len(pages) > _MAX_RANGES_CHARS:
        raise InvalidRequest(f"`pages` has more than {_MAX_RANGES_CHARS} characters")
    for part in pages.split(","):
        if (match := _RANGE.fullmatch(part.strip())) is None:
            raise InvalidRequest("`pages` must be numbers and ranges of pages, from 1, such as 1-3,7")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last:
            raise InvalidRequest(f"`pages` has a range that is none: {match[0]}")
        if last > num_pages:
            raise InvalidRequest(f"`pages` has page {last}, but the document has {num_pages}")
        yield first, last


def _pixels(points: tuple[float, float], options: DocumentOptions, config: MediaConfig) -> tuple[int, int]:
    most = min(options.max_pixels or config.max_page_pixels, config.max_page_pixels, config.max_image_pixels)
    scale = (options.dpi or config.document_dpi) / POINTS_PER_INCH
    width, height = (max(1, math.ceil(side * scale)) for side in points)
    if width * height > most or max(width, height) > config.max_image_side:
        scale = min(math.sqrt(most / (points[0] * points[1])), config.max_image_side / max(points))
        width, height = (max(1, int(side * scale)) for side in points)
    return width, height


# PDFium. Not thread-safe; one thread of a preparer calls it.


@functools.cache
def _pdfium() -> Any:
    """Return the library, initialised in this process without the folders of the system's fonts."""
    library = load_pdfium()
    folders = (ctypes.POINTER(ctypes.c_char) * 1)()
    config = library.FPDF_LIBRARY_CONFIG(version=2)
    config.m_pUserFontPaths = ctypes.cast(folders, ctypes.POINTER(ctypes.POINTER(ctypes.c_char)))
    library.FPDF_InitLibraryWithConfig(config)
    return library


@functools.cache
def renderer() -> str:
    """Return the version of PDFium."""
    info = importlib.import_module("pypdfium2_raw.version").PDFIUM_INFO
    return f"pdfium-{info.version}"


class _Document:
    def __init__(self, handle: Any, fields: Any, num_bytes: int) -> None:
        self._lib = _pdfium()
        self._handle = handle
        self._num_bytes = num_bytes
        self._fields = fields
        self.num_pages: int = self._lib.FPDF_GetPageCount(handle)

    @classmethod
    @contextmanager
    def open(cls, data: memoryview) -> Iterator[_Document]:
        """Open a document over its bytes, without a copy. Raises InvalidDocument, also for one without pages."""
        lib, held = _pdfium(), np.frombuffer(data, np.uint8)
        with ExitStack() as opened:
            handle = lib.FPDF_LoadMemDocument64(held.ctypes.data_as(ctypes.c_void_p), held.size, None)
            if not handle:
                code = lib.FPDF_GetLastError()
                known = (message for name, message in _MESSAGES.items() if getattr(lib, name) == code)
                raise InvalidDocument(next(known, _DAMAGED))
            opened.callback(lib.FPDF_CloseDocument, handle)
            fields, callbacks = None, lib.FPDF_FORMFILLINFO(version=2)
            if lib.FPDF_GetFormType(handle) != lib.FORMTYPE_NONE:
                fields = lib.FPDFDOC_InitFormFillEnvironment(handle, callbacks)
                opened.callback(lib.FPDFDOC_ExitFormFillEnvironment, fields)
            document = cls(handle, fields, held.size)
            if not document.num_pages:
                raise InvalidDocument("the document has no pages")
            yield document

    def size(self, number: int) -> tuple[float, float]:
        """Return width and height of a page in points, as it is displayed. Raises InvalidDocument."""
        size = self._lib.FS_SIZEF()
        is_known = self._lib.FPDF_GetPageSizeByIndexF(self._handle, number - 1, size)
        if not is_known or not (0 < size.width < math.inf and 0 < size.height < math.inf):
            raise InvalidDocument(f"page {number} of the document is damaged")
        return size.width, size.height

    def render(self, number: int, width: int, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        lib = self._lib
        pixels = np.empty((height, width, 3), np.uint8)
        with self._page(number) as page:
            bitmap = lib.FPDFBitmap_CreateEx(
                width, height, lib.FPDFBitmap_BGR, pixels.ctypes.data_as(ctypes.c_void_p), pixels.strides[0]
            )
            if not bitmap:
                raise InvalidDocument(f"page {number} of the document cannot be rendered")
            lib.FPDFBitmap_FillRect(bitmap, 0, 0, width, height, 0xFFFFFFFF)
            drawn = bitmap, page, 0, 0, width, height, 0, lib.FPDF_ANNOT | lib.FPDF_REVERSE_BYTE_ORDER
            lib.FPDF_RenderPageBitmap(*drawn)
            if self._fields:
                lib.FPDF_FFLDraw(self._fields, *drawn)
            lib.FPDFBitmap_Destroy(bitmap)
        return pixels

    def text(self, number: int) -> str:
        """Return the text of a page, as far as it is inside of it."""
        lib, box = self._lib, self._lib.FS_RECTF()
        with self._page(number) as page, ExitStack() as opened:
            read = lib.FPDFText_LoadPage(page)
            if not read or not lib.FPDF_GetPageBoundingBox(page, box):
                raise InvalidDocument(f"page {number} of the document is damaged")
            opened.callback(lib.FPDFText_ClosePage, read)
            area = read, box.left, box.top, box.right, box.bottom
            num_units = max(0, lib.FPDFText_GetBoundedText(*area, None, 0))
            units = (ctypes.c_ushort * num_units)()
            lib.FPDFText_GetBoundedText(*area, units, num_units)
        return bytes(units).decode("utf-16-le", "ignore").replace("\r\n", "\n").replace("\0", "")

    def digests(self, content: str, numbers: Sequence[int]) -> dict[int, str]:
        """Return what identifies the pages, by number. `content` is the hash of the document."""
        left = max(_MIN_WRITTEN_BYTES, _MAX_WRITTEN * self._num_bytes)
        digests = {number: blake3(f"medialane-page-of-1 {content} {number}".encode()).hexdigest() for number in numbers}
        for number in numbers:
            if self._fields or left < 0:
                break
            written = self._written(number)
            left -= len(written)
            start, end = written.find(_FIRST_OBJECT), written.rfind(_TABLE)
            if 0 < start < end and _DEPENDENT.search(written) is None:
                digests[number] = blake3(b"medialane-page-1" + written[start:end]).hexdigest()
        return digests

    def _written(self, number: int) -> bytes:
        lib, pieces = self._lib, list[bytes]()

        def write(_file: int, piece: int, num_bytes: int) -> int:
            pieces.append(ctypes.string_at(piece, num_bytes))
            return 1

        sink = lib.FPDF_FILEWRITE(version=1)
        callback = _WRITE(write)
        sink.WriteBlock = ctypes.cast(callback, type(sink.WriteBlock))
        single = lib.FPDF_CreateNewDocument()
        try:
            is_written = lib.FPDF_ImportPagesByIndex(single, self._handle, (ctypes.c_int * 1)(number - 1), 1, 0)
            is_written = is_written and lib.FPDF_SaveAsCopy(single, sink, lib.FPDF_NO_INCREMENTAL)
        finally:
            lib.FPDF_CloseDocument(single)
        return b"".join(pieces) if is_written else b""

    @contextmanager
    def _page(self, number: int) -> Iterator[Any]:
        lib = self._lib
        if not (page := lib.FPDF_LoadPage(self._handle, number - 1)):
            raise InvalidDocument(f"page {number} of the document is damaged")
        if self._fields:
            lib.FORM_OnAfterLoadPage(page, self._fields)
        try:
            yield page
        finally:
            if self._fields:
                lib.FORM_OnBeforeClosePage(page, self._fields)
            lib.FPDF_ClosePage(page)
