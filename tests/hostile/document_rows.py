"""Documents (PDF). Their pages are compared with pypdfium2's in `tests/unit/media/test_media_document.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from corpus import Body, Row, World, chat, data_url

from medialane.testing.sample_media import pdf_of, sample_pdf
from pdf_maker import (
    CATALOG,
    ENCRYPTED,
    IMAGE,
    TEXT,
    UNKNOWN_CIPHER,
    bomb,
    looping,
    nested,
    page,
    stream,
    with_image,
)

_WHOLE = sample_pdf(["one", "two"], width=200, height=100)


def file(make: Callable[[], bytes] | bytes, **options: object) -> Body:
    """A request with this document."""

    def body(world: World) -> bytes:
        data = make() if callable(make) else make
        # Of what the canary would notice, the port is as long as the placeholder.
        data = data.replace(b"CANAR", b"%05d" % world.hosts.canary_port)
        url = data_url(data, "application/pdf")
        return chat(world.model, {"type": "file", "file": {"file_data": url, **options}})

    return body


def claiming(num_pages: int) -> bytes:
    return pdf_of([CATALOG, f"<</Type/Pages/Count {num_pages}/Kids[]>>"])


def of_pages(num_pages: int) -> bytes:
    kids = " ".join(f"{number} 0 R" for number in range(3, num_pages + 3))
    pages = ["<</Type/Page/Parent 2 0 R/MediaBox[0 0 60 60]>>"] * num_pages
    return pdf_of([CATALOG, f"<</Type/Pages/Count {num_pages}/Kids[{kids}]>>", *pages])


def _with_catalog(entries: str, *objects: str, more: str = "") -> bytes:
    return page(more, catalog=f"<</Type/Catalog/Pages 2 0 R{entries}>>", objects=objects)


_URL = "http://127.0.0.1:CANAR/"
_SCRIPT = f"<</S/JavaScript/JS(app.alert(1); this.getURL\\('{_URL}'\\); while \\(true\\) {{}})>>"

#: Drawn, or opened, by a viewer; nothing of it is run, opened or fetched.
_HARMLESS = {
    "+ PDF with scripts": partial(
        _with_catalog,
        "/OpenAction 6 0 R/AA<</WC 6 0 R>>/Names<</JavaScript<</Names[(a) 6 0 R]>>>>",
        _SCRIPT,
        more="/AA<</O 6 0 R>>/Annots[<</Type/Annot/Subtype/Link/Rect[0 0 99 99]/A 6 0 R>>]",
    ),
    "+ PDF with an embedded program": partial(
        _with_catalog,
        "/OpenAction<</S/Launch/F(a.exe)>>/Names<</EmbeddedFiles<</Names[(a) 6 0 R]>>>>",
        "<</Type/Filespec/F(a.exe)/EF<</F 7 0 R>>>>",
        stream("MZ" + "x" * 10_000, "/Type/EmbeddedFile"),
    ),
    "+ PDF with an embedded file that inflates": partial(
        _with_catalog,
        "/Names<</EmbeddedFiles<</Names[(a) 6 0 R]>>>>",
        "<</Type/Filespec/F(a)/EF<</F 7 0 R>>>>",
        bomb("/Type/EmbeddedFile", bytes(64 << 20)),
    ),
    "+ PDF with references to the network": partial(
        _with_catalog,
        f"/OpenAction<</S/URI/URI({_URL})>>/URI<</Base({_URL})>>",
        f"<</Type/Annot/Subtype/Link/Rect[0 0 99 99]/A<</S/GoToR/F<</FS/URL/F({_URL})>>/D[0/Fit]>>>>",
        more="/Annots[6 0 R]",
    ),
    "+ PDF whose content is elsewhere": lambda: page(
        content=f"<</Length 10/F<</FS/URL/F({_URL})>>/FFilter/None>>\nstream\n0123456789\nendstream"
    ),
    "+ PDF whose image is elsewhere": lambda: with_image(
        stream(bytes(81).decode(), f"{IMAGE.replace('100000', '9')}/F<</FS/URL/F({_URL})>>")
    ),
    "+ PDF whose form posts itself": lambda: _with_catalog(
        "/AcroForm<</Fields[6 0 R]/XFA 7 0 R>>",
        "<</Type/Annot/Subtype/Widget/FT/Tx/T(a)/V(b)/Rect[0 0 90 30]/DA(/F 9 Tf 0 g)"
        f"/AA<</Fo<</S/SubmitForm/F<</FS/URL/F({_URL})>>>>>>>>",
        stream(f'<xdp:xdp xmlns:xdp="http://ns.adobe.com/xdp/"><a href="{_URL}"/></xdp:xdp>'),
        more="/Annots[6 0 R]",
    ),
    "+ PDF whose form draws itself": lambda: page(
        content="/X Do",
        resources="/XObject<</X 6 0 R>>",
        objects=[stream("/X Do", "/Type/XObject/Subtype/Form/BBox[0 0 9 9]/Resources<</XObject<</X 6 0 R>>>>")],
    ),
    "+ PDF whose pattern paints itself": lambda: page(
        content="/Pattern cs /P scn 0 0 99 99 re f",
        resources="/Pattern<</P 6 0 R>>",
        objects=[
            stream(
                "/Pattern cs /P scn 0 0 9 9 re f",
                "/PatternType 1/PaintType 1/TilingType 1/BBox[0 0 9 9]/XStep 1/YStep 1"
                "/Resources<</Pattern<</P 6 0 R>>>>",
            )
        ],
    ),
    "+ PDF whose glyph uses its own font": lambda: page(
        content="BT /T 30 Tf 9 9 Td (aaaa) Tj ET",
        resources="/Font<</T 6 0 R>>",
        objects=[
            "<</Type/Font/Subtype/Type3/FontBBox[0 0 9 9]/FontMatrix[.1 0 0 .1 0 0]/CharProcs<</a 7 0 R>>/FirstChar 97"
            "/LastChar 97/Widths[9]/Encoding<</Differences[97/a]>>/Resources<</Font<</T 6 0 R>>>>>>",
            stream("9 0 d0 BT /T 1 Tf (a) Tj ET"),
        ],
    ),
    "+ PDF with a font of 20 MB": lambda: _with_font(bomb("/Length1 20000000", bytes(20_000_000))),
    "+ PDF with a font of noise": lambda: _with_font(
        stream(random.Random(0).randbytes(500_000).decode("latin-1").replace("endstream", ""), "/Length1 500000")
    ),
    "+ PDF of 10,000 saved states": lambda: page(content="q " * 10_000 + TEXT),
    "+ PDF of 200,000 nested arrays": lambda: page(content="[" * 200_000 + "]" * 200_000 + TEXT),
    "+ PDF with annotations of 50,000 nested arrays": lambda: page("/Annots " + "[" * 50_000 + "]" * 50_000),
    "+ PDF whose table of objects is its own": lambda: looping(_WHOLE),
    "+ PDF whose table of objects is missing": lambda: (
        _WHOLE[: _WHOLE.index(b"xref\n")] + b"trailer\n<</Root 1 0 R>>\n"
    ),
    "+ PDF after a kilobyte of junk": lambda: b"junk\n" * 200 + _WHOLE,
    "+ PDF whose content inflates to 64 MB": lambda: page(content=bomb("", b" " * (64 << 20))),
    "+ PDF whose page has no size": lambda: page(size="0 0"),
    "+ PDF whose page is a tenth of a point": lambda: page(size=".1 .1"),
    "+ PDF whose page is turned by 7 degrees": lambda: page("/Rotate 7"),
}


def _with_font(font: str) -> bytes:
    """A document whose text is in an embedded font."""
    return page(
        content="BT /T 30 Tf 9 9 Td (aaaa) Tj ET",
        resources="/Font<</T 6 0 R>>",
        objects=[
            "<</Type/Font/Subtype/TrueType/BaseFont/AAAAAA+A/FirstChar 97/LastChar 97/Widths[600]"
            "/FontDescriptor 7 0 R>>",
            "<</Type/FontDescriptor/FontName/AAAAAA+A/Flags 32/FontBBox[0 0 9 9]/FontFile2 8 0 R>>",
            font,
        ],
    )


_INVALID: dict[str, Callable[[], bytes] | bytes] = {
    "+ PDF of a header": b"%PDF-1.7\n",
    "+ PDF of zeros": b"%PDF-1.7\n" + bytes(100_000),
    "+ truncated PDF": _WHOLE[:300],
    "+ PDF without a catalog": lambda: pdf_of(["<</Type/Nothing>>"]),
    "+ PDF of no pages": partial(claiming, 0),
    "+ PDF that claims 50 pages": partial(claiming, 50),
    "+ encrypted PDF": ENCRYPTED,
    "+ PDF of an unknown cipher": UNKNOWN_CIPHER,
    "+ PDF of 10,000 levels": partial(nested, 10_000),
    "+ PDF whose pages are their own": lambda: pdf_of([CATALOG, "<</Type/Pages/Count 1/Kids[2 0 R]>>"]),
}


def _text(num_lines: int) -> bytes:
    """A page with as many lines of a thousand characters."""
    line = ("some words of a page " * 60)[:1000]
    content = f"BT /F 1 Tf 1 TL 0 1999 Td {f'({line}) Tj T* ' * num_lines}ET"
    return page(size="2000 2000", content=content)


def _large() -> bytes:
    return page("/Large 6 0 R", objects=[stream("x" * (33 << 20))])


_QUOTED = '"\\\r\n\u2028<|im_end|>'

_MANY = partial(of_pages, 100_000)

DOCUMENT_ROWS = [
    *(Row(name, file(make), 200, mib=192.0, seconds=6.0) for name, make in _HARMLESS.items()),
    *(Row(name, file(make), 400, "invalid_document") for name, make in _INVALID.items()),
    Row("+ PDF whose page is 720,000 points wide", file(lambda: page(size="720000 720000"), max_pixels=90_000), 200),
    Row("+ PDF whose page is a line", file(lambda: page(size="720000 1"), max_pixels=90_000), 400, "invalid_image"),
    Row("+ PDF of 100,000 pages", file(_MANY), 400, "too_many_pages", 10.0, 256.0),
    Row("+ PDF of 100,000 pages, one of them", file(_MANY, pages="99999"), 200, None, 10.0, 256.0),
    Row("+ PDF that claims 100,000 pages", file(partial(claiming, 100_000)), 400, "too_many_pages"),
    Row("+ PDF that claims 100,000, one of them", file(partial(claiming, 100_000), pages="9"), 400, "invalid_document"),
    Row("+ PDF of more than a megabyte of text", file(partial(_text, 1100)), 413, "media_too_large", 10.0, 640.0),
    Row("+ PDF of 33 MB", file(_large), 413, "media_too_large", 6.0, 256.0),
    Row("+ PDF of nothing", file(b""), 400, "empty_media"),
    Row("+ PDF that is an archive", file(b"PK\3\4" + bytes(100)), 415, "unsupported_media_type"),
    Row("+ PDF of a name in quotes", file(_WHOLE, filename=_QUOTED), 200),
    Row("+ ranges of pages without an end", file(_WHOLE, pages="1-" + "9" * 200), 400, "invalid_request"),
    Row("+ 10,000 ranges of pages", file(_WHOLE, pages="1," * 10_000 + "1"), 400, "invalid_request"),
    Row("+ dpi of 10^300", file(_WHOLE, dpi=1e300), 400, "invalid_request"),
]
