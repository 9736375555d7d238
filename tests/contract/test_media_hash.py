"""Our hashes of media equal the ones that vLLM computes for what its own loaders have loaded."""

import uuid
from io import BytesIO

import msgspec
import numpy as np
import pytest
from PIL import Image
from vllm.multimodal.media import ImageMediaIO, VideoMediaIO
from vllm.multimodal.media.audio import AudioMediaIO
from vllm.multimodal.parse import MultiModalDataItems, VisionChunkProcessorItems
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm_hashes import vllm_hashes

from audio_maker import by_libsndfile, tones
from decoded_media import decode_video
from medialane.media import MediaConfig, decode, sniff_image
from medialane.types.feature import MediaPrompt
from medialane.types.hashing import DecodedItem, EncodedItem
from medialane.types.media import Alias, FrameBatch, MediaRef, MediaSize
from medialane.vllm_bridge.frontend.render import HashFactors, VllmMediaHasher
from medialane.vllm_bridge.items import VllmFrameSampler
from medialane.vllm_bridge.seams.multimodal import processor_of, video_backend
from video_clips import clip, jpegs

pytestmark = [
    pytest.mark.timeout(120),
    # a warning of torch when vLLM resamples audio
    pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning"),
]

ORIENTATION, IMAGE_ID = 0x0112, 0x800D  # the latter is ImageID of Pillow's ExifTags
CONFIG = MediaConfig()


def saved(mode, kind, size=(40, 24), **options):
    rng = np.random.default_rng(len(mode))
    image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).convert(mode)
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def exif(**tags):
    made = Image.Exif()
    for tag, value in {"orientation": ORIENTATION, "image_id": IMAGE_ID}.items():
        if tag in tags:
            made[value] = tags[tag]
    return made


def with_alpha_masks(data: bytes) -> bytes:
    """A BMP of 32 bits with the masks of a header of version 4."""
    pixels = data[54:]
    header = bytearray(data[:54]) + b"\0" * 68
    header[10:14] = (122).to_bytes(4, "little")
    header[14:18] = (108).to_bytes(4, "little")
    header[30:34] = (3).to_bytes(4, "little")
    for place, mask in zip((54, 58, 62, 66), (0xFF0000, 0xFF00, 0xFF, 0xFF000000), strict=True):
        header[place : place + 4] = mask.to_bytes(4, "little")
    return bytes(header) + pixels


def animated(mode):
    frames = [Image.new(mode, (16, 16), colour) for colour in ("red", "blue")]
    out = BytesIO()
    frames[0].save(out, "WEBP", save_all=True, append_images=frames[1:])
    return out.getvalue()


IMAGES = {
    "jpeg": saved("RGB", "JPEG"),
    "progressive jpeg": saved("RGB", "JPEG", progressive=True),
    "grey jpeg": saved("L", "JPEG"),
    "cmyk jpeg": saved("CMYK", "JPEG"),
    "turned jpeg": saved("RGB", "JPEG", exif=exif(orientation=6)),
    "turned grey jpeg": saved("L", "JPEG", exif=exif(orientation=6)),
    "jpeg with an ImageID": saved("RGB", "JPEG", exif=exif(image_id=str(uuid.UUID(int=7)))),
    "jpeg with an ImageID of bytes": saved("RGB", "JPEG", exif=exif(image_id=uuid.UUID(int=7).bytes)),
    "png": saved("RGB", "PNG"),
    "png with alpha": saved("RGBA", "PNG"),
    "png with palette": saved("P", "PNG"),
    "png with transparent palette": saved("P", "PNG", transparency=3),
    "png with a transparent colour": saved("RGB", "PNG", transparency=(1, 2, 3)),
    "grey png": saved("L", "PNG"),
    "grey png with alpha": saved("LA", "PNG"),
    "png of one bit": saved("1", "PNG"),
    "turned png": saved("RGB", "PNG", exif=exif(orientation=8)),
    "webp": saved("RGB", "WEBP"),
    "webp with alpha": saved("RGBA", "WEBP"),
    "lossless webp": saved("RGB", "WEBP", lossless=True),
    "lossless webp with alpha": saved("RGBA", "WEBP", lossless=True),
    "webp with exif": saved("RGB", "WEBP", exif=exif(orientation=3)),
    "lossless webp with exif": saved("RGB", "WEBP", lossless=True, exif=exif(orientation=3)),
    "lossless webp with alpha and exif": saved("RGBA", "WEBP", lossless=True, exif=exif(orientation=3)),
    "animated webp": animated("RGB"),
    "animated webp with alpha": animated("RGBA"),
    "gif": saved("P", "GIF"),
    "grey gif": saved("L", "GIF"),
    "avif": saved("RGB", "AVIF"),
    "avif with alpha": saved("RGBA", "AVIF"),
    "bmp": saved("RGB", "BMP"),
    "grey bmp": saved("L", "BMP"),
    "bmp with palette": saved("P", "BMP"),
    "bmp of one bit": saved("1", "BMP"),
    "bmp of 32 bits": saved("RGBA", "BMP"),
    "bmp with alpha": with_alpha_masks(saved("RGBA", "BMP")),
}

NO_FACTORS = HashFactors()
FACTORS = {
    "none": NO_FACTORS,
    "options": HashFactors({"max_pixels": 50176, "min_pixels": 3136}),
    "options in another order": HashFactors({"min_pixels": 3136, "max_pixels": 50176}),
    "options of one modality": HashFactors({"images_kwargs": {"a": 1}, "videos_kwargs": {"b": 2.0}}),
    "decoding": HashFactors({}, {"image": {"image_mode": "RGB"}, "video": {"fps": 2}}),
    "both": HashFactors({"do_resize": True}, {"video": {"num_frames": 4, "fps": 2.0}}),
}


@pytest.fixture(scope="module")
def processor(renderer):
    return processor_of(renderer)


@pytest.fixture(scope="module")
def hasher(processor):
    return VllmMediaHasher(processor)


def by_vllm(processor, modality, loaded, factors=NO_FACTORS, uuid=None):
    items = processor.info.parse_mm_data({modality: [loaded]})
    inputs = ProcessorInputs([], items, {modality: [uuid]}, factors.options, factors.io)
    return vllm_hashes(processor, inputs)[modality][0]


def ours(hasher, item, factors=NO_FACTORS):
    ref = item if isinstance(item, MediaRef) else item.ref
    return hasher.hashes(MediaPrompt([], (ref,), hash_factors=msgspec.json.encode(factors)), [item])[0]


def image_item(data, **fields):
    return EncodedItem(MediaRef("image", "p", data=data, **fields), data, MediaSize(), sniff_image(data, CONFIG).is_rgb)


@pytest.mark.parametrize("kind", IMAGES)
def test_hash_of_an_image_is_vllms_without_its_pixels(processor, hasher, kind):
    data = IMAGES[kind]
    item = image_item(data)
    assert not hasher.needs_decoding(item)
    assert ours(hasher, item) == by_vllm(processor, "image", ImageMediaIO().load_bytes(data))


def test_the_images_include_converted_and_unconverted_ones():
    converted = {kind: ImageMediaIO().load_bytes(data).io_config is not None for kind, data in IMAGES.items()}
    assert {converted[kind] for kind in IMAGES} == {True, False}
    assert converted == {kind: not sniff_image(data, CONFIG).is_rgb for kind, data in IMAGES.items()}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("kind", ["jpeg", "png with alpha"])
def test_options_enter_the_hash_as_in_vllm(processor, hasher, kind, name):
    data, factors = IMAGES[kind], FACTORS[name]
    loaded = ImageMediaIO().load_bytes(data)
    assert ours(hasher, image_item(data), factors) == by_vllm(processor, "image", loaded, factors)


@pytest.mark.parametrize("name", FACTORS)
def test_uuid_is_the_hash_unless_there_are_options(processor, hasher, name):
    ref = MediaRef("image", "p", alias=Alias("of the client", "image"))
    hashed = ours(hasher, ref, FACTORS[name])
    assert hashed == by_vllm(processor, "image", None, FACTORS[name], uuid="of the client")
    assert (hashed == "of the client") == (name == "none")


LONG = clip(40, size=(320, 240), fps=10, options={"qp": "40"})
NOISY = clip(
    40,
    size=(64, 48),
    draw=lambda n, w, h: np.random.default_rng(n).integers(0, 256, (h, w, 3), np.uint8),
    options={"qp": "1"},
)
VIDEOS = {
    "mp4": LONG,
    "file larger than its frames": NOISY,
    "webm": clip(20, codec="libvpx-vp9", container="webm", size=(160, 120)),
    "jpeg frames": jpegs(5),
}


def sampled(processor, data, io):
    return decode_video(data, CONFIG, VllmFrameSampler(processor.info.ctx.model_config), io)


def loaded_video(processor, data, io):
    backend = video_backend(processor.info.ctx.model_config)
    reader = VideoMediaIO(ImageMediaIO(), **({"video_backend": backend} if backend else {}), **io)
    return reader.load_base64("video/jpeg", data.decode()) if data[:4] == b"/9j/" else reader.load_bytes(data)


@pytest.mark.parametrize("io", [{}, {"num_frames": 4}, {"fps": 2}], ids=str)
@pytest.mark.parametrize("kind", VIDEOS)
def test_hash_of_a_video_is_vllms(processor, hasher, kind, io):
    data, factors = VIDEOS[kind], HashFactors({}, {"video": io} if io else {})
    expected = by_vllm(processor, "video", loaded_video(processor, data, io), factors)
    frames: FrameBatch = sampled(processor, data, io)
    ref = MediaRef("video", "p", data=data)
    item = EncodedItem(ref, data, frames.size)
    decoded = DecodedItem(ref, data, frames)
    assert ours(hasher, decoded if hasher.needs_decoding(item) else item, factors) == expected


def test_frames_that_are_smaller_than_the_file_must_be_decoded(processor, hasher):
    def needs_decoding(kind, io):
        ref = MediaRef("video", "p", data=VIDEOS[kind])
        return hasher.needs_decoding(EncodedItem(ref, VIDEOS[kind], sampled(processor, VIDEOS[kind], io).size))

    assert not needs_decoding("mp4", {})
    assert needs_decoding("file larger than its frames", {"num_frames": 4})


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen2_5_omni", "ultravox"])
@pytest.mark.parametrize("rate", [16000, 44100])
def test_hash_of_audio_is_that_of_its_resampled_samples(family_renderer, family, rate):
    processor = processor_of(family_renderer(family))
    hasher = VllmMediaHasher(processor)
    data = by_libsndfile(tones(rate, 2, 0.7), rate, "FLAC")
    ref = MediaRef("audio", "p", data=data)
    assert hasher.needs_decoding(EncodedItem(ref, data, MediaSize()))
    media = decode(memoryview(data), "audio", media_type="audio/flac", io=b"{}", config=CONFIG, sampler=None)
    expected = by_vllm(processor, "audio", AudioMediaIO().load_bytes(data))
    assert ours(hasher, DecodedItem(ref, data, media)) == expected


def test_items_of_several_modalities_keep_their_places(family_renderer):
    processor = processor_of(family_renderer("qwen2_5_omni"))
    hasher = VllmMediaHasher(processor)
    items = [image_item(IMAGES["jpeg"]), MediaRef("audio", "p", alias=Alias("a", "audio")), image_item(IMAGES["png"])]
    refs = tuple(item if isinstance(item, MediaRef) else item.ref for item in items)
    hashes = hasher.hashes(MediaPrompt([], refs), items)
    assert hashes == [ours(hasher, items[0]), "a", ours(hasher, items[2])]
    assert len(set(hashes)) == 3


def test_image_of_a_vision_chunk_is_hashed_by_its_pixels(family_renderer):
    """vLLM's chat parser puts the loaded image, not its bytes, into the chunk."""
    processor = processor_of(family_renderer("kimi_k25"))
    hasher = VllmMediaHasher(processor)
    data = IMAGES["turned jpeg"]
    item = image_item(data)
    assert hasher.needs_decoding(item)
    media = decode(memoryview(data), "image", media_type="image/jpeg", io=b"{}", config=CONFIG, sampler=None)
    chunk = {"type": "image", "image": ImageMediaIO().load_bytes(data).media, "uuid": None}
    items = MultiModalDataItems({"vision_chunk": VisionChunkProcessorItems([chunk])})
    (expected,) = vllm_hashes(processor, ProcessorInputs([], items))["vision_chunk"]
    assert ours(hasher, DecodedItem(item.ref, data, media)) == expected


def test_option_of_one_video_of_several_enters_its_hash_only(family_renderer):
    """Qwen3-VL takes a list with an entry for each video."""
    processor = processor_of(family_renderer("qwen3_vl"))
    hasher = VllmMediaHasher(processor)
    factors = HashFactors({"videos_kwargs": {"fps": [1.0, 2.0]}})
    size = MediaSize(width=32, height=32, num_frames=4, metadata=b"{}")
    item = EncodedItem(MediaRef("video", "p", data=b"file"), b"file", size)
    prompt = MediaPrompt([], (item.ref, item.ref), hash_factors=msgspec.json.encode(factors))
    first, second = hasher.hashes(prompt, [item, item])
    assert first != second
