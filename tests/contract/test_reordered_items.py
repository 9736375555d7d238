"""A family that has another order for its items than the request (Jina-VL: reversed, the query's follow the document's)
is served in stage `decoded`; there, each item keeps its own hash."""

import numpy as np
import pytest
from vllm.model_executor.models.jina_vl import JinaVLMultiModalProcessor

from medialane.types.feature import MediaPayload
from medialane.types.media import Image
from medialane.types.request import EngineRequest, UnexpandedPrompt
from model_parts import unexpanded_renderer

IMAGES = [Image(np.full((side, 56, 3), side, np.uint8)) for side in (56, 112)]


@pytest.fixture
def reversing(renderer, monkeypatch):
    """The tiny model's renderer, with Jina-VL's processor."""
    found = renderer.get_mm_processor()
    monkeypatch.setattr(renderer, "mm_processor", JinaVLMultiModalProcessor(found.info, found.dummy_inputs))
    return renderer


@pytest.mark.parametrize("options", [b"{}", b'{"do_rescale":true}'], ids=["no options", "options"])
async def test_item_keeps_its_hash(reversing, options):
    token_ids = reversing.tokenizer.encode("<|vision_start|><|image_pad|><|vision_end|>" * 2, add_special_tokens=False)
    media = tuple(
        MediaPayload("image", name * 64, b"", (), image.size) for name, image in zip("ab", IMAGES, strict=True)
    )
    source = unexpanded_renderer(reversing)
    prompt = UnexpandedPrompt(token_ids, media, stage="decoded", options=options)
    tensors = [[memoryview(image.pixels.tobytes())] for image in IMAGES]
    found = await source.render(EngineRequest("r", prompt, b""), prompt, tensors)
    source.close()
    rows = [int(item["image_grid_thw"].data[1]) for item in found["mm_kwargs"]["image"]]
    assert rows == [8, 4]  # of the second image, then of the first
    hashes = found["mm_hashes"]["image"]
    if options == b"{}":
        assert hashes == ["b" * 64, "a" * 64]
    else:  # vLLM's own
        assert len(set(hashes)) == 2
        assert not {"a" * 64, "b" * 64} & set(hashes)
