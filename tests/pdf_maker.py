"""PDF documents with one unusual thing each: of one page, nested, encrypted, inflating."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from medialane.testing.sample_media import pdf_of

CATALOG, TREE = "<</Type/Catalog/Pages 2 0 R>>", "<</Type/Pages/Count 1/Kids[3 0 R]>>"
FONT = "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"
TEXT = "BT /F 30 Tf 20 20 Td (some text) Tj ET"
#: An image that is much larger than its page.
IMAGE = "/Type/XObject/Subtype/Image/Width 100000/Height 100000/ColorSpace/DeviceGray/BitsPerComponent 1"


def page(
    more: str = "",
    *,
    size: str = "200 100",
    content: str = TEXT,
    tree: str = TREE,
    catalog: str = CATALOG,
    resources: str = "/Font<</F 5 0 R>>",
    objects: Sequence[str] = (),
    trailer: str = "",
) -> bytes:
    """A document of one page, object 3, with its content, object 4; `objects` are from 6."""
    drawn = stream(content) if "stream" not in content else content
    box = f"/MediaBox[0 0 {size}]" if size else ""
    first = f"<</Type/Page/Parent 2 0 R{box}/Resources<<{resources}>>/Contents 4 0 R{more}>>"
    return pdf_of([catalog, tree, first, drawn, FONT, *objects], trailer=trailer)


def stream(data: str, head: str = "") -> str:
    return f"<<{head}/Length {len(data)}>>\nstream\n{data}\nendstream"


def bomb(head: str, data: bytes) -> str:
    """A stream that inflates to `data`."""
    return stream(zlib.compress(data, 9).decode("latin-1"), f"{head}/Filter/FlateDecode")


def nested(depth: int) -> bytes:
    """One page below as many levels of the page tree."""
    kids = [f"<</Type/Pages/Count 1/Kids[{number + 1} 0 R]>>" for number in range(2, depth + 2)]
    return pdf_of([CATALOG, *kids, "<</Type/Page/MediaBox[0 0 9 9]>>"])


def with_image(image: str) -> bytes:
    """A page that shows an image."""
    shown = "9 0 0 9 0 0 cm/X Do"
    return page(size="9 9", content=shown, resources="/XObject<</X 6 0 R>>", objects=[image])


def encrypted(cipher: str) -> bytes:
    return pdf_of(
        [CATALOG, TREE, "<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>", cipher], trailer="/Encrypt 4 0 R/ID[<00><00>]"
    )


#: Opens with a password; in a way that no reader knows.
ENCRYPTED = encrypted(f"<</Filter/Standard/V 1/R 2/P -4/O({'o' * 32})/U({'u' * 32})>>")
UNKNOWN_CIPHER = encrypted("<</Filter/Mine/V 9>>")


def looping(data: bytes) -> bytes:
    """The document, with a table of objects before its own, which is that one."""
    start = data.rindex(b"xref\n0 ")
    return data.replace(b"/Root 1 0 R", b"/Root 1 0 R/Prev %d" % start)
