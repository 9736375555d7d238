"""Descriptions of published images, and the form in which their pixels are cached."""

import base64
import io

import msgspec
import numpy as np
import pytest
from PIL import Image as PILImage

from medialane.media import (
    MAX_URL_BYTES,
    PIXMAP_HEADER_BYTES,
    PIXMAP_TYPE,
    RDMA_TYPE,
    MediaConfig,
    decode,
    is_published,
    needs_probe,
    pixmap_header,
    pixmap_size,
    read_published,
    sniff,
)
from medialane.types.errors import (
    ImageTooLarge,
    InvalidBase64,
    InvalidDataUrl,
    InvalidImage,
    MediaTooLarge,
    UnsupportedMediaType,
)
from published import published_url

CONFIG = MediaConfig()
PIXELS = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)
PIXMAP = pixmap_header(5, 7) + PIXELS.tobytes()


def url_of(document: object) -> str:
    return f"data:{RDMA_TYPE};base64,{base64.b64encode(msgspec.json.encode(document)).decode()}"


def test_published_image_is_recognised_by_the_type_of_its_url():
    assert is_published(published_url(b"{}", 7, 5))
    assert is_published(f"DATA:{RDMA_TYPE.upper()};base64,e30=")
    assert not is_published("https://example.org/a.png")
    assert not is_published("data:image/png;base64,e30=")


def test_description_is_read():
    image = read_published(published_url(b'{"a":1}', 7, 5), CONFIG)
    assert (image.shape, image.num_bytes, bytes(image.rdma_metadata)) == ((7, 5, 3), 105, b'{"a":1}')


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ({"rdma_metadata": {}, "shape": [7, 5]}, InvalidImage),
        ({"rdma_metadata": {}, "shape": [7, 5, 4]}, InvalidImage),
        ({"rdma_metadata": {}, "shape": [7, 0, 3]}, InvalidImage),
        ({"rdma_metadata": {}, "shape": [-7, -5, 3]}, InvalidImage),
        ({"rdma_metadata": {}, "shape": [7, 5, 3], "dtype": "float32"}, InvalidImage),
        ({"rdma_metadata": {}, "shape": [7, 5, 3], "more": 1}, InvalidImage),
        ({"shape": [7, 5, 3]}, InvalidImage),
        ([], InvalidImage),
        ({"rdma_metadata": {}, "shape": [7, 20_000, 3]}, ImageTooLarge),
        ({"rdma_metadata": {}, "shape": [16_000, 16_000, 3]}, ImageTooLarge),
        ({"rdma_metadata": "x" * MAX_URL_BYTES, "shape": [7, 5, 3]}, MediaTooLarge),
    ],
)
def test_invalid_description_is_refused(document, error):
    with pytest.raises(error):
        read_published(url_of(document), CONFIG)


@pytest.mark.parametrize(("rest", "error"), [("", InvalidDataUrl), (";base64,*", InvalidBase64)])
def test_invalid_url_is_refused(rest, error):
    with pytest.raises(error):
        read_published(f"data:{RDMA_TYPE}{rest}", CONFIG)


def test_pixmap_is_decoded_to_the_same_pixels_here_and_by_pillow():
    """A worker's vLLM uses Pillow."""
    assert len(pixmap_header(16384, 16384)) == len(pixmap_header(1, 1)) == PIXMAP_HEADER_BYTES
    assert pixmap_size(memoryview(PIXMAP)) == (5, 7)
    found = decode(memoryview(PIXMAP), "image", media_type=PIXMAP_TYPE, io=b"{}", config=CONFIG, sampler=None)
    assert np.array_equal(found.pixels, PIXELS)
    assert np.array_equal(np.asarray(PILImage.open(io.BytesIO(PIXMAP))), PIXELS)


@pytest.mark.parametrize("data", [PIXMAP[:-1], PIXMAP + b"\0", b"P6\n5 7\n255\n" + PIXELS.tobytes(), b""])
def test_other_bytes_are_not_decoded_as_a_pixmap(data):
    with pytest.raises(InvalidImage):
        decode(memoryview(data), "image", media_type=PIXMAP_TYPE, io=b"{}", config=CONFIG, sampler=None)


def test_clients_cannot_send_pixmaps():
    with pytest.raises(UnsupportedMediaType):
        sniff(PIXMAP, "image", CONFIG)
    assert not needs_probe(PIXMAP_TYPE)
