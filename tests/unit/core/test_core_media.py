"""Media references and decoded pixels check themselves."""

import numpy as np
import pytest

from medialane.core.media import Image, MediaRef, MediaSize


@pytest.mark.parametrize("both_or_none", [{}, {"url": "http://a/", "data": b"a"}])
def test_reference_has_either_a_url_or_data(both_or_none):
    with pytest.raises(ValueError, match="a media reference has"):
        MediaRef("image", "p", **both_or_none)


def test_repr_of_a_reference_shows_only_the_byte_count():
    assert "6 bytes" in repr(MediaRef("image", "p", data=b"secret"))


def test_image_size_follows_its_pixels():
    assert Image(np.zeros((2, 3, 3), np.uint8)).size == MediaSize(width=3, height=2)


@pytest.mark.parametrize(("shape", "dtype"), [((2, 3), "uint8"), ((2, 3, 4), "uint8"), ((2, 3, 3), "float32")])
def test_invalid_pixel_shape_is_rejected(shape, dtype):
    with pytest.raises(ValueError, match="pixels"):
        Image(np.zeros(shape, dtype))
