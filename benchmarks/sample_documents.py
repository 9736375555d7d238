"""Papers as PDF: two columns of text, a table with rules on every other page, a photo on every third; compressed, as
programs write them. And what a client makes of them without a server that takes PDF: a PNG of each page."""

from __future__ import annotations

import io
import textwrap
import zlib
from collections.abc import Iterator

import pypdfium2

from load import random_text
from medialane.testing.sample_media import pdf_of, sample_jpeg

#: A4, in points.
WIDTH, HEIGHT = 595, 842
_MARGIN, _COLUMN, _GAP, _LEADING = 50, 237, 21, 11
_NUM_LINES, _NUM_CHARS = 66, 52
#: Of the photo, in pixels and points.
_PHOTO, _SHOWN = (480, 320), (237, 158)
_POINTS_PER_INCH = 72


def paper(seed: int, num_pages: int) -> bytes:
    """Return a paper; with another seed, no page is the same; with more pages, the first ones are."""
    first = 4  # object
    kids = " ".join(f"{first + 3 * number} 0 R" for number in range(num_pages))
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Count {num_pages}/Kids[{kids}]>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
    ]
    for number in range(num_pages):
        page, has_photo = first + 3 * number, number % 3 == 0
        photo = f"/XObject<</P {page + 2} 0 R>>" if has_photo else ""
        resources = f"/Resources<</Font<</F 3 0 R>>{photo}>>"
        box = f"/MediaBox[0 0 {WIDTH} {HEIGHT}]"
        objects += [
            f"<</Type/Page/Parent 2 0 R{box}{resources}/Contents {page + 1} 0 R>>",
            _stream(zlib.compress(_drawn(seed, number, has_photo=has_photo).encode()), "/Filter/FlateDecode"),
            _photo(1000 * seed + number) if has_photo else "null",
        ]
    return pdf_of(objects)


def _drawn(seed: int, number: int, *, has_photo: bool) -> str:
    """Return the operators of a page."""
    words = random_text(1000 * seed + number, 1300).replace("(", "").replace(")", "")
    lines = iter(textwrap.wrap(words, _NUM_CHARS))
    top = HEIGHT - _MARGIN
    parts = [f"BT /F 14 Tf {_MARGIN} {top} Td (Paper {seed}, section {number + 1}) Tj ET"]
    for column in range(2):
        num_lines = _NUM_LINES - (18 if column and (has_photo or number % 2) else 0)
        left = _MARGIN + column * (_COLUMN + _GAP)
        shown = "".join(f"({line}) Tj T*\n" for line, _ in zip(lines, range(num_lines), strict=False))
        parts.append(f"BT /F 9 Tf {_LEADING} TL {left} {top - 24} Td\n{shown}ET")
    left = _MARGIN + _COLUMN + _GAP
    if has_photo:
        parts.append(f"q {_SHOWN[0]} 0 0 {_SHOWN[1]} {left} {_MARGIN} cm /P Do Q")
    elif number % 2:
        parts += _table(left)
    return "\n".join(parts)


def _table(left: int) -> Iterator[str]:
    """Yield the rules of a table, grey rows and their numbers."""
    for row in range(10):
        y = _MARGIN + 15 * row
        yield f"{0.9 if row % 2 else 1} g {left} {y} {_COLUMN} 15 re f 0 g"
        yield f"0.5 w {left} {y} m {left + _COLUMN} {y} l S"
        yield "".join(
            f"BT /F 8 Tf {left + 6 + 58 * column} {y + 4} Td ({(row + 3) * (column + 7) % 97}.{row}) Tj ET\n"
            for column in range(4)
        )


def _photo(seed: int) -> str:
    width, height = _PHOTO
    form = f"/Type/XObject/Subtype/Image/Width {width}/Height {height}/ColorSpace/DeviceRGB/BitsPerComponent 8"
    return _stream(sample_jpeg(seed, width, height, quality=75), f"{form}/Filter/DCTDecode")


def _stream(data: bytes, members: str) -> str:
    return f"<<{members}/Length {len(data)}>>\nstream\n{data.decode('latin-1')}\nendstream"


def as_png(document: bytes, dpi: int) -> list[bytes]:
    """Return the pages as a client makes them, of the pixels that medialane makes."""
    return [png(page.render(scale=dpi / _POINTS_PER_INCH, rev_byteorder=True)) for page in pages(document)]


def png(bitmap: pypdfium2.PdfBitmap) -> bytes:
    out = io.BytesIO()
    bitmap.to_pil().save(out, "PNG")
    return out.getvalue()


def pages(document: bytes) -> Iterator[pypdfium2.PdfPage]:
    with pypdfium2.PdfDocument(document) as opened:
        for number in range(len(opened)):
            page = opened[number]
            yield page
            page.close()
