"""Audio of several windows: the number of its tokens is read from a mask that is larger than small fields."""

import numpy as np
import pytest
from tiny_families import FAMILIES

from medialane.types.feature import Feature, MediaPayload
from medialane.types.media import AudioSamples
from medialane.types.request import ExpandedPrompt
from medialane.vllm_bridge.items import VllmProcessor, decode_item, decode_item_without_tensors, engine_media
from medialane.vllm_bridge.learned import ModelProfile, VllmAssembler
from medialane.vllm_bridge.learned.assembler import placeholder_ranges
from medialane.vllm_bridge.seams.multimodal import process_whole

pytestmark = pytest.mark.timeout(120)  # creates the family's checkpoint and renderer


@pytest.fixture(scope="module", params=["glmasr", "audioflamingo3"])
def processor(request, family_renderer):
    return family_renderer(request.param).get_mm_processor()


def tone(seconds):
    return AudioSamples(np.sin(np.arange(int(seconds * 16000), dtype=np.float32) / 7), 16000)


@pytest.mark.parametrize("seconds", [2.5, 29.9, 34.0, 95.0])
def test_prompt_and_validation_are_those_of_the_whole(processor, seconds):
    media = tone(seconds)
    text = FAMILIES["glmasr" if "GlmAsr" in type(processor).__name__ else "audioflamingo3"].prompt("audio", " what?")
    token_ids = processor.info.get_tokenizer().encode(text, add_special_tokens=False)
    whole = process_whole(processor, token_ids, {"audio": [engine_media(media)]})
    item = VllmProcessor(processor).process(media, b"{}")
    feature = Feature("audio", "a", item.header, (), item.size)
    assembled = VllmAssembler(processor).assemble(token_ids, (feature,), b"{}")
    assert assembled.token_ids == whole["prompt_token_ids"]
    assert list(assembled.placeholders) == placeholder_ranges(whole)["audio"]
    (place,) = assembled.placeholders
    payload = MediaPayload("audio", "a", item.header, (), item.size, place)
    found = decode_item(item.header, item.buffers)
    ModelProfile(processor).checker.check(ExpandedPrompt(assembled.token_ids, (payload,)), [found])


def test_only_the_mask_is_added_to_the_header(processor):
    item = VllmProcessor(processor).process(tone(34), b"{}")
    mask = decode_item_without_tensors(item.header)["feature_attention_mask"].data
    assert mask.nbytes > 16 * 1024  # a tensor, if it were not read
    assert int(mask.sum()) == 3400  # frames of 10 ms
    assert len(item.specs) == 1


def test_model_is_served_in_stage_features(processor):
    assert not ModelProfile(processor).unfit
