"""Hashes of media in all families: each has its own parser, sampler and options."""

import msgspec
import pytest
from tiny_families import FAMILIES, family_params
from vllm.multimodal.media import ImageMediaIO, VideoMediaIO
from vllm.multimodal.media.audio import AudioMediaIO
from vllm.multimodal.parse import MultiModalDataItems, VisionChunkProcessorItems
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm_hashes import vllm_hashes

from audio_maker import by_libsndfile, tones
from medialane.media import MediaConfig, decode, sniff
from medialane.testing.sample_media import sample_jpeg
from medialane.types.feature import MediaPrompt
from medialane.types.hashing import DecodedItem, EncodedItem
from medialane.types.media import MediaRef
from medialane.vllm_bridge.frontend import VllmMediaHasher
from medialane.vllm_bridge.items import VllmFrameSampler
from medialane.vllm_bridge.seams.multimodal import processor_of, video_backend
from medialane.vllm_bridge.seams.vision_chunk import takes_chunks
from video_clips import clip

pytestmark = [
    pytest.mark.whole,
    # The first test of a family creates its checkpoint and renderer.
    pytest.mark.timeout(120),
    # a warning of torch when vLLM resamples audio
    pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning"),
]

CONFIG = MediaConfig()
MEDIA = {
    "image": sample_jpeg(3, 224, 224),
    "video": clip(60, size=(128, 96), fps=10),
    "audio": by_libsndfile(tones(22050, 2, 1.1), 22050),
}


def loaded(processor, modality, data):
    """The item as vLLM's loader returns it."""
    if modality == "image":
        return ImageMediaIO().load_bytes(data)
    if modality == "audio":
        return AudioMediaIO().load_bytes(data)
    backend = video_backend(processor.info.ctx.model_config)
    return VideoMediaIO(ImageMediaIO(), **({"video_backend": backend} if backend else {})).load_bytes(data)


def by_vllm(processor, modality, item):
    if takes_chunks(processor):
        chunk = {"type": "image", "image": item.media, "uuid": None}
        items = MultiModalDataItems({"vision_chunk": VisionChunkProcessorItems([chunk])})
    else:
        items = processor.info.parse_mm_data({modality: [item]})
    ((hashed,),) = vllm_hashes(processor, ProcessorInputs([], items)).values()
    return hashed


def ours(processor, modality, data):
    hasher, ref = VllmMediaHasher(processor), MediaRef(modality, "p", data=data)
    media = decode(
        memoryview(data), modality, media_type=sniff(data, modality, CONFIG), io=b"{}", config=CONFIG,
        sampler=VllmFrameSampler(processor.info.ctx.model_config),
    )  # fmt: skip
    encoded = EncodedItem(ref, data, media.size)
    item = DecodedItem(ref, data, media) if hasher.needs_decoding(encoded) else encoded
    return hasher.hashes(MediaPrompt([], (ref,), hash_factors=msgspec.json.encode({})), [item])


@pytest.mark.parametrize("name", family_params())
def test_hashes_are_those_of_plain_vllm(family_renderer, name):
    processor = processor_of(family_renderer(name))
    for modality in FAMILIES[name].limits:
        expected = by_vllm(processor, modality, loaded(processor, modality, MEDIA[modality]))
        assert ours(processor, modality, MEDIA[modality]) == [expected]
