"""Models with an encoder's prompt and a decoder's: what a worker passes to its engine equals what vLLM's renderer makes
of the same request, in every stage."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_families import FAMILIES
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.renderers.inputs.preprocess import parse_model_prompt

from medialane.gateway import wave_bytes
from medialane.testing.tiny_model import cache_folder
from medialane.types.errors import StartupFailed
from medialane.types.feature import Feature, MediaPayload, PlaceholderRange
from medialane.types.media import AudioSamples
from medialane.types.request import EngineRequest, ExpandedPrompt, UnexpandedPrompt
from medialane.vllm_bridge.engine.engine_options import check_prefix_cache, engine_args
from medialane.vllm_bridge.engine.engine_request import RequestReader, clamp, placed_media
from medialane.vllm_bridge.items import VllmProcessor
from medialane.vllm_bridge.learned import ModelProfile, VllmAssembler

pytestmark = pytest.mark.timeout(120)

RATE = 16000
SAMPLES = np.sin(np.arange(3 * RATE, dtype=np.float32) * 0.1)
MM_HASH = "f" * 64


@pytest.fixture(scope="module")
def renderer(family_renderer):
    return family_renderer("whisper")


@pytest.fixture(scope="module")
def reader(renderer):
    config = SimpleNamespace(kv_transfer_config=None)
    llm = SimpleNamespace(renderer=renderer, model_config=renderer.model_config, vllm_config=config)
    found = RequestReader(llm, ModelProfile(renderer.get_mm_processor()), set(), None)
    yield found
    found.renderer.close()


@pytest.fixture(scope="module")
def decoder(renderer):
    return renderer.tokenizer.convert_tokens_to_ids(["<|startoftranscript|>", "<|en|>", "<|transcribe|>"])


@pytest.fixture(scope="module")
def by_vllm(renderer, decoder):
    """vLLM's own engine input."""
    prompt = {
        "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (SAMPLES, RATE)}},
        "decoder_prompt": {"prompt_token_ids": decoder},
    }
    (rendered,) = renderer.render_cmpl([parse_model_prompt(renderer.model_config, prompt)])
    return rendered


@pytest.fixture(scope="module")
def processed(renderer):
    return VllmProcessor(renderer.get_mm_processor()).process(AudioSamples(SAMPLES, RATE), b"{}")


def features_prompt(renderer, processed, decoder):
    feature = Feature("audio", MM_HASH, processed.header, (), processed.size)
    # The gateway gets the encoder's text, which is empty; its renderer adds the decoder's prompt.
    assembled = VllmAssembler(renderer.get_mm_processor()).assemble([], (feature,), b"{}")
    (place,) = assembled.placeholders
    payload = MediaPayload("audio", MM_HASH, processed.header, processed.specs, processed.size, place)
    return ExpandedPrompt(decoder, (payload,), encoder_token_ids=assembled.encoder_token_ids)


def unexpanded_prompt(stage, decoder):
    size = AudioSamples(SAMPLES, RATE).size
    item = MediaPayload("audio", MM_HASH, b"", (), size, media_type="audio/wav" if stage == "url" else None)
    return UnexpandedPrompt(decoder, (item,), stage=stage, encoder_token_ids=[])


def sent(stage, renderer, decoder, processed):
    """The prompt and the tensors of its item."""
    if stage == "features":
        return features_prompt(renderer, processed, decoder), processed.buffers
    data = wave_bytes(SAMPLES, RATE) if stage == "url" else SAMPLES.tobytes()
    return unexpanded_prompt(stage, decoder), [memoryview(data)]


@pytest.mark.parametrize("stage", ["features", "decoded", "url"])
async def test_engine_gets_both_prompts_and_the_item_of_vllms_renderer(
    stage, renderer, reader, decoder, processed, by_vllm
):
    prompt, tensors = sent(stage, renderer, decoder, processed)
    found = await reader.engine_input(EngineRequest("r", prompt, b""), [tensors])
    assert (found["type"], by_vllm["type"]) == ("enc_dec", "enc_dec")
    for part in ("encoder_prompt", "decoder_prompt"):
        assert found[part]["prompt_token_ids"] == by_vllm[part]["prompt_token_ids"]
    ours, theirs = found["decoder_prompt"], by_vllm["decoder_prompt"]
    assert ours["mm_hashes"] == {"audio": [MM_HASH]}
    assert ours["mm_placeholders"] == theirs["mm_placeholders"]
    (item,), (wanted,) = ours["mm_kwargs"]["audio"], theirs["mm_kwargs"]["audio"]
    assert item.keys() == wanted.keys()
    for name, elem in item.items():
        assert torch.equal(elem.data, wanted[name].data), name


@pytest.mark.parametrize("stage", ["features", "decoded", "url"])
async def test_what_was_generated_elsewhere_follows_the_decoders_prompt(
    stage, renderer, reader, decoder, processed, by_vllm
):
    prompt, tensors = sent(stage, renderer, decoder, processed)
    found = await reader.engine_input(EngineRequest("r", prompt, b"", generated=[7, 8]), [tensors])
    assert found["encoder_prompt"]["prompt_token_ids"] == by_vllm["encoder_prompt"]["prompt_token_ids"]
    assert found["decoder_prompt"]["prompt_token_ids"] == [*by_vllm["decoder_prompt"]["prompt_token_ids"], 7, 8]
    assert prompt.token_ids == decoder


def test_placeholder_in_the_encoders_prompt_is_not_one_of_the_prompt_that_is_continued(by_vllm):
    assert placed_media(by_vllm) == []


def test_answer_is_limited_by_the_decoders_prompt(by_vllm):
    params = SimpleNamespace(max_tokens=1000, min_tokens=0)
    clamp(params, by_vllm, 448)
    assert params.max_tokens == 448 - len(by_vllm["decoder_prompt"]["prompt_token_ids"])


async def test_placeholder_beyond_the_encoders_prompt_is_refused(renderer, reader, processed, decoder):
    prompt = features_prompt(renderer, processed, decoder)
    (feature,) = prompt.features
    longer = PlaceholderRange(0, feature.placeholder.length + 1)
    bad = MediaPayload("audio", MM_HASH, feature.header, feature.tensors, feature.size, longer)
    request = EngineRequest("r", prompt.with_media([bad]), b"")
    with pytest.raises(Exception, match="a placeholder ends at"):
        await reader.engine_input(request, [processed.buffers], [])


@pytest.mark.parametrize(("flags", "fits"), [((), True), (("--enable-prefix-caching",), False)])
def test_engine_without_a_prefix_cache_starts_and_one_that_would_end_does_not(flags, fits):
    family = FAMILIES["whisper"]
    args = engine_args(str(family.build(cache_folder(os.environ))), [*family.flags, *flags])
    assert isinstance(args, AsyncEngineArgs)
    config = args.create_engine_config()
    assert config.cache_config.enable_prefix_caching is not fits
    if fits:
        check_prefix_cache(config)
    else:
        with pytest.raises(StartupFailed, match="--enable-prefix-caching"):
            check_prefix_cache(config)
