"""Families whose items are not processed one by one: in stage `decoded`, a worker's engine gets what vLLM's renderer
makes of the whole request, and each item keeps its hash."""

import pytest
import torch
from test_family_preparation import FIRST, SECOND
from tiny_families import CHECKED
from vllm.renderers.inputs.preprocess import parse_model_prompt

from medialane.types.feature import MediaPayload
from medialane.types.media import AudioSamples
from medialane.types.request import EngineRequest, UnexpandedPrompt
from medialane.vllm_bridge.items import decoder_input, engine_media
from medialane.vllm_bridge.learned import ModelProfile
from model_parts import unexpanded_renderer

pytestmark = [
    pytest.mark.timeout(300),  # the first test of a family creates its checkpoint
    pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning"),
]

CASES = [
    pytest.param(family.name, modality, count, id=f"{family.name}: {count} {modality}", marks=family.marks)
    for family in CHECKED.values()
    if family.stage == "decoded"
    for modality, limit in family.limits.items()
    for count in (1, 2)
    if count <= limit
]


@pytest.mark.parametrize(("name", "modality", "count"), CASES)
async def test_workers_result_is_that_of_vllms_renderer(family_renderer, name, modality, count):
    family, renderer = CHECKED[name], family_renderer(name)
    media = [FIRST[modality], SECOND[modality]][:count]
    token_ids = renderer.tokenizer.encode(family.prompt("Here ", *[modality] * count), add_special_tokens=False)
    hashes = [letter * 64 for letter in "ab"][:count]
    whole = _rendered(renderer, family, token_ids, {modality: list(map(engine_media, media))}, {modality: hashes})

    items = tuple(MediaPayload(modality, h, b"", (), m.size) for h, m in zip(hashes, media, strict=True))
    encoder = [] if family.has_encoder_prompt else None
    prompt = UnexpandedPrompt(token_ids, items, stage="decoded", encoder_token_ids=encoder)
    source = unexpanded_renderer(renderer, ModelProfile(renderer.get_mm_processor()))
    found = await source.render(EngineRequest("r", prompt, b""), prompt, [[_bytes(item)] for item in media])
    source.close()

    assert found["type"] == whole["type"]
    mine, theirs = decoder_input(found), decoder_input(whole)
    assert mine["prompt_token_ids"] == theirs["prompt_token_ids"]
    assert mine["mm_placeholders"] == theirs["mm_placeholders"]
    assert mine["mm_hashes"] == theirs["mm_hashes"]
    assert sorted(mine["mm_hashes"][modality]) == hashes
    for one, other in zip(mine["mm_kwargs"][modality], theirs["mm_kwargs"][modality], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[field].data, other[field].data) for field in one)


def _rendered(renderer, family, token_ids, media, hashes):
    prompt = {"multi_modal_data": media, "multi_modal_uuids": hashes}
    if family.has_encoder_prompt:
        prompt = {"encoder_prompt": {"prompt": "", **prompt}, "decoder_prompt": {"prompt_token_ids": token_ids}}
    else:
        prompt |= {"prompt_token_ids": token_ids}
    (rendered,) = renderer.render_cmpl([parse_model_prompt(renderer.model_config, prompt)])
    return rendered


def _bytes(media):
    data = media.samples if isinstance(media, AudioSamples) else media.pixels
    return memoryview(data.tobytes())
