"""Media references and decoded pixels check themselves."""

import numpy as np
import pytest

from medialane.types.media import Image, MediaRef, MediaSize


@pytest.mark.parametrize("both_or_none", [{}, {"url": "http://a/", "data": b"a"}])
def test_reference_has_either_a_url_or_data(both_or_none):
    with pytest.raises(ValueError, match="a media reference has"):
        MediaRef("image", "p", **both_or_none)


def test_repr_of_a_reference_shows_only_the_byte_count():
    assert "6 bytes" in repr(MediaRef("image", "p", data=b"secret"))


def test_clients_url_is_that_of_the_body():
    assert MediaRef("image", "p", url="http://a/b.png").client_url == "http://a/b.png"
    assert MediaRef("image", "p", data=b"abc", media_type="image/png").client_url == "data:image/png;base64,YWJj"


def test_image_size_follows_its_pixels():
    assert Image(np.zeros((2, 3, 3), np.uint8)).size == MediaSize(width=3, height=2)


@pytest.mark.parametrize(("shape", "dtype"), [((2, 3), "uint8"), ((2, 3, 4), "uint8"), ((2, 3, 3), "float32")])
def test_invalid_pixel_shape_is_rejected(shape, dtype):
    with pytest.raises(ValueError, match="pixels"):
        Image(np.zeros(shape, dtype))
