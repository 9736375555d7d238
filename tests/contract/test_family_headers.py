"""Headers that follow from the size of the media, for each family: they equal those of the processed items."""

from functools import cache

import numpy as np
import pytest
from tiny_families import PREPARED, family_params

from medialane.types.hashing import canonical_options
from medialane.types.media import AudioSamples, FrameBatch, Image
from medialane.vllm_bridge.items import expand_marks
from medialane.vllm_bridge.learned import ModelProfile
from model_parts import request_processor

pytestmark = [
    # The first test of a family creates its checkpoint and renderer.
    pytest.mark.timeout(120),
    # a warning of torch when vLLM resamples audio
    pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

#: None of these sizes is one of the trial at start, and none is that of an icon, whose pixels fit into a header.
IMAGES = [(640, 480), (333, 777), (1280, 720), (200, 1000)]
VIDEOS = [(5, 320, 240), (8, 90, 120), (1, 224, 224)]
AUDIO = [(3.21, 16000), (34.0, 16000), (1.7, 44100)]

#: Families with a modality that is not predicted, and why.
NOT_PREDICTED: dict[str, set[str]] = {}


def photo(width, height):
    """A bright picture with detail: neither noise nor blank."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([x * 255 // width, y * 255 // height, (x * y) % 251], axis=-1)
    return Image(np.ascontiguousarray(pixels.astype(np.uint8)))


def clip(num_frames, width, height):
    metadata = {
        "total_num_frames": 3 * num_frames,
        "fps": 12.5,
        "duration": 3 * num_frames / 12.5,
        "video_backend": "opencv",
        "frames_indices": list(range(0, 3 * num_frames, 3)),
        "do_sample_frames": False,
    }
    frames = np.stack([np.roll(photo(width, height).pixels, 9 * n, axis=1) for n in range(num_frames)])
    return FrameBatch(frames, canonical_options(metadata))


def chirp(seconds, rate):
    times = np.arange(int(seconds * rate), dtype=np.float32) / np.float32(rate)
    return AudioSamples(np.sin(np.float32(2000) * times * times).astype(np.float32), rate)


MEDIA = {
    "image": [photo(*size) for size in IMAGES],
    "video": [clip(*size) for size in VIDEOS],
    "audio": [chirp(*size) for size in AUDIO],
}


@pytest.fixture(scope="module")
def of_family(family_renderer):
    """A preparer's processor and what the gateway knows, by family, created on first use."""

    @cache
    def made(name):
        profile = ModelProfile(family_renderer(name).get_mm_processor())
        expand_marks(profile.processor)
        return request_processor(profile), profile.assembler(max_tokens=4096)

    return made


def outcome(call, *arguments):
    """What a call returns; of an item that the processor refuses, the type of the error."""
    try:
        item = call(*arguments)
    except Exception as error:  # noqa: BLE001 - it is compared
        return type(error)
    return item and (item.header, item.size)


@pytest.mark.parametrize("name", [pytest.param(family.name, marks=family.marks) for family in PREPARED.values()])
def test_header_of_a_size_is_that_of_any_item_of_the_size(of_family, name):
    processor, assembler = of_family(name)
    modalities = PREPARED[name].limits.keys()
    assert assembler.predicted >= modalities - NOT_PREDICTED.get(name, set())
    for modality in modalities & assembler.predicted:
        for media in MEDIA[modality]:
            described = outcome(processor.describe, modality, media.size, b"{}")
            assert described == outcome(processor.process, media, b"{}"), (modality, media.size)


@pytest.mark.parametrize("name", family_params(pixel_limits=True))
def test_header_of_a_size_follows_pixel_limits(of_family, name):
    processor, _ = of_family(name)
    media = photo(900, 700)
    for options in (b'{"max_pixels":150000}', b'{"max_pixels":200000,"min_pixels":100000}'):
        described = processor.describe("image", media.size, options)
        made = processor.process(media, options)
        assert (described.header, described.size) == (made.header, made.size)
        assert described.header != processor.describe("image", media.size, b"{}").header
