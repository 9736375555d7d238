"""Opening documents and rendering their pages, through the door of `media`: in the process of the test, without a
sandbox. Pixels are compared with those that pypdfium2 renders by its own means."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from medialane.media import MediaConfig, decode, measure, open_document, probe, sniff
from medialane.testing.sample_media import pdf_of, sample_pdf
from medialane.types.errors import (
    EmptyMedia,
    ImageTooLarge,
    InvalidDocument,
    InvalidRequest,
    MediaTooLarge,
    TooManyPages,
    Unavailable,
    UnsupportedMediaType,
)
from medialane.types.media import PDF_TYPE, DocumentOptions, MediaSize
from pdf_maker import CATALOG, ENCRYPTED, FONT, IMAGE, TEXT, TREE, UNKNOWN_CIPHER, bomb, nested, page, with_image

pypdfium2 = pytest.importorskip("pypdfium2")

TEXTS = ["one", "two", "three"]


def opened(data, options=None, **limits):
    return open_document(memoryview(data), "c" * 64, options or DocumentOptions(), MediaConfig(**limits))


def ios(document):
    return [each.io for each in document.pages]


def rendered(data, io):
    io = msgspec.json.encode(io)
    media = {"media_type": PDF_TYPE, "io": io, "config": MediaConfig(), "sampler": None}
    image = decode(memoryview(data), "image", **media)
    assert measure(memoryview(data), "image", **media) == image.size
    return image.pixels


def expected(data, number=1, dpi=144):
    with pypdfium2.PdfDocument(data) as document:
        document.init_forms()
        return document[number - 1].render(scale=dpi / 72, rev_byteorder=True).to_numpy().copy()


FIELD = (
    "<</Type/Annot/Subtype/Widget/FT/Tx/T(name)/V(filled)/Rect[10 10 150 40]/DA(/F 12 Tf 0 g)/P 3 0 R/MK<</BG[1 0 0]>>"
    "/AP<</N 7 0 R>>>>"
)
DRAWN = "<</Type/XObject/Subtype/Form/BBox[0 0 140 30]/Length 24>>\nstream\n1 0 0 rg 0 0 140 30 re f\nendstream"
FORM = page(
    "/Annots[6 0 R]", catalog="<</Type/Catalog/Pages 2 0 R/AcroForm<</Fields[6 0 R]>>>>", objects=[FIELD, DRAWN]
)
LAYERS = "<</Type/Catalog/Pages 2 0 R/OCProperties<</OCGs[6 0 R]/D<</OFF[%s]>>>>>>"
GROUP = "<</Type/OCG/Name(layer)>>"
IN_LAYER = f"/OC /L BDC {TEXT} EMC"


def layered(off):
    content = f"<</Length {len(IN_LAYER)}>>\nstream\n{IN_LAYER}\nendstream"
    resources = "/Resources<</Font<</F 5 0 R>>/Properties<</L 6 0 R>>>>"
    first = f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 100]{resources}/Contents 4 0 R>>"
    return pdf_of([LAYERS % off, TREE, first, content, FONT, GROUP])


@pytest.mark.parametrize(
    "data",
    [
        sample_pdf(TEXTS),
        page(),
        page(size="199.3 100.7"),
        page("/Rotate 90"),
        page("/CropBox[20 10 101 70]"),
        page(tree="<</Type/Pages/Count 1/Kids[3 0 R]/MediaBox[0 0 300 50]/Rotate 270>>", size=""),
        page("/OpenAction<</S/JavaScript/JS(app.alert(1))>>", catalog="<</Type/Catalog/Pages 2 0 R/OpenAction 6 0 R>>"),
        FORM,
        layered(""),
        layered("6 0 R"),
    ],
)
def test_page_is_what_pypdfium2_renders(data):
    document = opened(data)
    pixels = rendered(data, document.pages[0].io)
    assert np.array_equal(pixels, expected(data))
    assert pixels.shape[:2] == (document.pages[0].io.height, document.pages[0].io.width)


def test_fields_of_forms_are_drawn():
    assert (rendered(FORM, opened(FORM).pages[0].io) == (255, 0, 0)).all(axis=2).any()


def test_text_of_pages_is_read():
    document = opened(sample_pdf(["first (page)\nof \\ two lines", "", "third é"]))
    assert [each.text for each in document.pages] == ["first (page)\nof \\ two lines", "", "third é"]
    assert {each.text for each in opened(sample_pdf(TEXTS), DocumentOptions(text=False)).pages} == {""}


def test_same_page_has_the_same_identity_in_another_document():
    first, second = ios(opened(sample_pdf(TEXTS))), ios(opened(sample_pdf(["new", *TEXTS, "last"])))
    assert [each.digest for each in first] == [each.digest for each in second][1:4]
    assert len({each.digest for each in second}) == 5
    (other,) = ios(opened(sample_pdf(["one"], font_size=13)))
    assert other.digest != first[0].digest


@pytest.mark.parametrize("data", [FORM, layered(""), layered("6 0 R")])
def test_page_that_depends_on_more_than_its_objects_is_of_its_document_only(data):
    first, other = (open_document(memoryview(data), hash_, DocumentOptions(), MediaConfig()) for hash_ in "ab")
    assert ios(first)[0].digest != ios(other)[0].digest


def test_pages_with_the_same_large_resources_are_written_in_bounded_time():
    """Each of a thousand pages refers to all of the document."""
    noise = np.random.default_rng(0).bytes(3 << 20).hex()
    shared = f"<</Length {len(noise)}/Filter/ASCIIHexDecode>>\nstream\n{noise}\nendstream"
    kids = " ".join(f"{n} 0 R" for n in range(4, 1004))
    pages = ["<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Resources<</XObject<</X 3 0 R>>>>>>"] * 1000
    data = pdf_of([CATALOG, f"<</Type/Pages/Count 1000/Kids[{kids}]>>", shared, *pages])
    began = time.process_time()
    document = opened(data, DocumentOptions(text=False), max_document_pages=1000)
    assert len({each.digest for each in ios(document)}) > 900
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({}, [1, 2, 3]),
        ({"pages": "2"}, [2]),
        ({"pages": "3, 1-2,2"}, [1, 2, 3]),
        ({"pages": "1,3", "max_pages": 2}, [1, 3]),
    ],
)
def test_pages_are_chosen_by_number_and_range(options, numbers):
    document = opened(sample_pdf(TEXTS), DocumentOptions(**options))
    assert ([each.page for each in ios(document)], document.num_pages) == (numbers, 3)


@pytest.mark.parametrize(
    "pages", ["0", "2-1", "1-", "-2", "a", "1;2", ",", "1,,2", "1-2-3", "4", "1-9999999", "9" * 300]
)
def test_ranges_that_are_none_are_refused(pages):
    with pytest.raises(InvalidRequest, match="`pages`"):
        opened(sample_pdf(TEXTS), DocumentOptions(pages=pages))


@pytest.mark.parametrize(
    ("options", "limits"),
    [({"max_pages": 2}, {}), ({}, {"max_document_pages": 2}), ({"max_pages": 9}, {"max_document_pages": 2})],
)
def test_document_of_too_many_pages_is_refused_with_both_numbers(options, limits):
    with pytest.raises(TooManyPages, match="has 3 pages, more than 2: choose some"):
        opened(sample_pdf(TEXTS), DocumentOptions(**options), **limits)


def test_claimed_pages_count_before_any_is_looked_at():
    data = pdf_of([CATALOG, "<</Type/Pages/Count 100000/Kids[]>>"])
    with pytest.raises(TooManyPages, match="100000 pages, more than 100"):
        opened(data)
    with pytest.raises(InvalidDocument, match="page 99999 of the document"):
        opened(data, DocumentOptions(pages="99999"))


@pytest.mark.parametrize(
    ("options", "limits", "size"),
    [
        ({}, {}, (400, 200)),
        ({"dpi": 72}, {}, (200, 100)),
        ({"dpi": 72, "max_pixels": 5000}, {}, (100, 50)),
        ({"max_pixels": 10**9}, {"max_page_pixels": 5000}, (100, 50)),
        ({}, {"document_dpi": 36}, (100, 50)),
        ({}, {"max_image_pixels": 5000}, (100, 50)),
        ({}, {"max_image_side": 100}, (100, 50)),
    ],
)
def test_resolution_is_the_wanted_one_unless_a_limit_is_lower(options, limits, size):
    (found,) = ios(opened(page(), DocumentOptions(**options), **limits))
    assert (found.width, found.height) == size


@pytest.mark.parametrize("options", [{"dpi": 10**12}, {"dpi": 1, "max_pixels": 1}, {"max_pixels": 10**12}])
def test_resolution_of_any_size_has_pixels_within_the_limits(options):
    (found,) = ios(opened(page(), DocumentOptions(**options)))
    assert 1 <= found.width * found.height <= MediaConfig().max_page_pixels


@pytest.mark.parametrize("size", ["720000 720000", "720000 1", "0.001 0.001", "14400 14400"])
def test_page_of_any_size_has_pixels_within_the_limits(size):
    data = page(size=size)
    (found,) = ios(opened(data))
    assert 1 <= found.width * found.height <= MediaConfig().max_page_pixels
    assert max(found.width, found.height) <= MediaConfig().max_image_side
    io = msgspec.json.encode(found)
    assert measure(
        memoryview(data), "image", media_type=PDF_TYPE, io=io, config=MediaConfig(), sampler=None
    ) == MediaSize(found.width, found.height)


def test_page_is_not_rendered_beyond_the_limits_of_images_or_by_another_release():
    data = page()
    (io,) = ios(opened(data))
    with pytest.raises(ImageTooLarge):
        rendered(data, msgspec.structs.replace(io, width=100_000))
    with pytest.raises(Unavailable):
        rendered(data, msgspec.structs.replace(io, renderer="pdfium-1"))
    with pytest.raises(UnsupportedMediaType, match="send it as a document"):
        decode(memoryview(data), "image", media_type=PDF_TYPE, io=b"{}", config=MediaConfig(), sampler=None)


def test_text_is_bounded():
    data = sample_pdf(["a line of text\n" * 40] * 3)
    opened(data, max_document_text_bytes=1800)
    for options in (DocumentOptions(), DocumentOptions(pages="3")):
        with pytest.raises(MediaTooLarge, match="text of the document's pages has more than 500 bytes"):
            opened(data, options, max_document_text_bytes=500)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"%PDF-1.7\n", "damaged"),
        (b"%PDF-1.7\n" + bytes(10_000), "damaged"),
        (sample_pdf(TEXTS)[:300], "damaged"),
        (pdf_of(["<</Type/Nothing>>"]), "no pages|damaged"),
        (pdf_of([CATALOG, "<</Type/Pages/Count 0/Kids[]>>"]), "no pages"),
        (ENCRYPTED, "password"),
        (UNKNOWN_CIPHER, "encrypted"),
    ],
)
def test_document_that_cannot_be_opened_says_why(data, message):
    for read in (opened, lambda data: probe(memoryview(data), "image", PDF_TYPE, MediaConfig())):
        with pytest.raises(InvalidDocument, match=message):
            read(data)


def test_truncated_document_that_can_be_repaired_is_opened():
    whole = sample_pdf(TEXTS)
    assert opened(whole[: whole.index(b"xref\n")] + b"trailer\n<</Root 1 0 R>>\n").num_pages == 3


@pytest.mark.parametrize(
    "data",
    [
        nested(10_000),
        page(content="[" * 200_000 + "]" * 200_000),
        page(content="q " * 200_000 + TEXT),
        page("/Annots " + "[" * 50_000 + "]" * 50_000),
        page(content=bomb("", b" " * (64 << 20))),
        with_image(bomb(IMAGE, bytes(32 << 20))),
        pdf_of([CATALOG, TREE, "<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 3 0 R>>"]),
        pdf_of([CATALOG, "<</Type/Pages/Count 1/Kids[2 0 R]>>"]),
        page(content="<</Length 10/F(http://127.0.0.1/a)/FFilter/None>>\nstream\n0123456789\nendstream"),
    ],
    ids=["page tree", "arrays", "states", "annotations", "content", "image", "itself", "kids", "external"],
)
def test_hostile_document_is_rendered_or_refused_in_bounded_time(data):
    began = time.process_time()
    try:
        document = opened(data)
        rendered(data, document.pages[0].io)
    except InvalidDocument:
        pass
    assert time.process_time() - began < 10  # as long as a preparer may take


def test_files_are_recognised():
    config = MediaConfig(max_document_bytes=1000)
    assert sniff(page(), "document", config) == PDF_TYPE
    assert sniff(b"junk\n" * 100 + page()[:400], "document", config) == PDF_TYPE
    for data, error in (
        (b"", EmptyMedia),
        (page() + bytes(1000), MediaTooLarge),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), UnsupportedMediaType),
        (b"PK\3\4" + bytes(100), UnsupportedMediaType),
    ):
        with pytest.raises(error):
            sniff(data, "document", config)
    with pytest.raises(UnsupportedMediaType, match="send it as a document"):
        sniff(page(), "image", config)
