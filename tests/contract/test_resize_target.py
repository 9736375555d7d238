"""Resize targets that families' processors predict, and features of JPEGs decoded smaller for them."""

from functools import cache
from io import BytesIO

import numpy as np
import pytest
from PIL import Image as PILImage
from tiny_families import FAMILIES, family_params

from medialane.core.hashing import canonical_options
from medialane.core.media import Image
from medialane.media import MediaConfig
from medialane.media.image import decode_image
from medialane.media.jpeg_scale import EIGHTHS
from medialane.vllm_bridge.items.features import decode_item
from medialane.vllm_bridge.items.preparation import VllmProcessor
from medialane.vllm_bridge.items.resize_target import MAX_REMEMBERED, ResizeTargets

pytestmark = [
    pytest.mark.timeout(120),
    # a warning of transformers when vLLM passes a request's options
    pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning"),
]

SIZE = (2400, 1800)
SMALLER = [(-(-SIZE[0] * k // 8), -(-SIZE[1] * k // 8)) for k in EIGHTHS]
MAX_PIXELS = canonical_options({"size": {"longest_edge": 200_000, "shortest_edge": 3136}})


@pytest.fixture(scope="module")
def processor(family_renderer):
    """A family's processor, created on first use."""
    return cache(lambda name: VllmProcessor(family_renderer(name).get_mm_processor()))


def photograph():
    coarse = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    return PILImage.fromarray(coarse).resize(SIZE, PILImage.Resampling.BICUBIC)


def jpeg(image):
    out = BytesIO()
    image.save(out, "JPEG", quality=92)
    return out.getvalue()


@pytest.mark.parametrize("name", family_params())
def test_families_predicting_the_resize_target(processor, name):
    assert processor(name).has_resize_target() == ("target" in FAMILIES[name].predicted)


@pytest.mark.parametrize("name", family_params(modality="image", predicted="target", pixel_limits=True))
def test_scaled_jpeg_gives_equal_shapes_and_similar_pixels(processor, name):
    one = processor(name)
    options = MAX_PIXELS

    class Chooser:
        def smaller_size(self, size, smaller):
            return one.smaller_size(size, smaller, options)

    data = jpeg(photograph())
    scaled = decode_image(data, MediaConfig(), Chooser())
    whole = decode_image(data, MediaConfig())
    assert scaled.pixels.shape < whole.pixels.shape
    mine, wanted = one.process(scaled, options), one.process(whole, options)
    assert (mine.header, mine.specs, mine.size) == (wanted.header, wanted.specs, wanted.size)
    mine, wanted = (decode_item(each.header, each.buffers)["pixel_values"].data.float() for each in (mine, wanted))
    spread = wanted.max() - wanted.min()  # pixels of 0 to 255, or normalised ones
    assert (mine - wanted).abs().mean() < 0.005 * spread


def test_decoded_size_is_at_least_twice_the_model_input(processor):
    targets = processor("qwen2_5_vl")._targets
    width, height = targets.target(SIZE, MAX_PIXELS)
    assert width * height <= 200_000
    assert abs(width / height - 4 / 3) < 0.15
    found = targets.smaller_size(SIZE, SMALLER, MAX_PIXELS)
    assert (found[0] >= 2 * width, found[1] >= 2 * height) == (True, True)
    before = SMALLER[SMALLER.index(found) - 1]
    assert before[0] < 2 * width or before[1] < 2 * height


def test_image_hardly_resized_is_decoded_at_full_size(processor):
    assert (
        processor("qwen2_5_vl").smaller_size(
            SIZE, SMALLER, canonical_options({"size": {"longest_edge": 4_000_000, "shortest_edge": 3136}})
        )
        is None
    )


def test_image_rejected_by_the_processor_is_decoded_at_full_size(processor):
    assert processor("qwen2_5_vl").smaller_size((6000, 20), [(3000, 10)], b"{}") is None


class Counting:
    """A processor that resizes all images to one size, except those narrower than `remembers`."""

    def __init__(self, inner, remembers=0):
        self.inner, self.remembers, self.num_calls = inner, remembers, 0

    def __call__(self, media, options):
        self.num_calls += 1
        side = 56 if media.pixels.shape[1] >= self.remembers else 84
        return self.inner.process(Image(np.zeros((side, side, 3), np.uint8)), options)


def test_smaller_size_changing_the_shapes_is_not_used(processor):
    distinguished = ResizeTargets(Counting(processor("qwen2_5_vl"), remembers=200), patch_side=14, crops=False)
    assert distinguished.smaller_size((400, 400), [(150, 150), (250, 250)], b"{}") is None
    same = ResizeTargets(Counting(processor("qwen2_5_vl")), patch_side=14, crops=False)
    assert same.smaller_size((400, 400), [(100, 100), (150, 150), (250, 250)], b"{}") == (150, 150)


def test_cache_of_sizes_is_bounded(processor):
    count = Counting(processor("qwen2_5_vl"))
    targets = ResizeTargets(count, patch_side=14, crops=False)
    for _ in range(3):
        targets.target((400, 400), b"{}")
    assert count.num_calls == 1
    for n in range(MAX_REMEMBERED):
        targets.target((401, 1 + n), b"{}")
    targets.target((400, 400), b"{}")
    assert count.num_calls == MAX_REMEMBERED + 2


@pytest.mark.parametrize(("patch_side", "crops"), [(None, False)])
def test_grid_without_patch_size_gives_no_target(processor, patch_side, crops):
    targets = ResizeTargets(processor("qwen2_5_vl").process, patch_side=patch_side, crops=crops)
    assert targets.target((300, 200), b"{}") is None


def test_cropped_image_gives_no_target(processor):
    process = processor("gemma3").process
    assert ResizeTargets(process, patch_side=None, crops=False).target((300, 200), b"{}") is not None
    assert ResizeTargets(process, patch_side=None, crops=True).target((300, 200), b"{}") is None
