import io

import pytest
from PIL import Image

from medialane.testing.sample_images import sample_jpeg, sample_pixels


def test_equal_arguments_give_equal_bytes():
    assert sample_jpeg(3, 320, 240) == sample_jpeg(3, 320, 240)


def test_different_seeds_and_sizes_give_different_images():
    pictures = {sample_jpeg(seed, width, 240) for seed in range(4) for width in (320, 321)}
    assert len(pictures) == 8


@pytest.mark.parametrize("seed", range(3))
def test_size_of_a_photo(seed):
    jpeg = sample_jpeg(seed, 1024, 768)
    assert 150_000 < len(jpeg) < 250_000
    assert Image.open(io.BytesIO(jpeg)).size == (1024, 768)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (7, 300), (300, 7)])
def test_odd_sizes_are_filled_completely(width, height):
    assert sample_pixels(0, width, height).shape == (height, width, 3)
