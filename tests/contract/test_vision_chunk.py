"""Models that take images as vLLM's `vision_chunk`: they are images of ours, with vLLM's own tokens and tensors."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kimi_families import write_kimi_k25
from PIL import Image as PILImage
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers.chat_utils import _resolve_vision_chunk_items

from medialane.types.errors import InvalidRequest
from medialane.types.feature import Feature
from medialane.types.media import Image, MediaRef
from medialane.vllm_bridge.frontend.renderer_hook import RendererHook
from medialane.vllm_bridge.items import VllmProcessor, decode_item
from medialane.vllm_bridge.learned import ModelProfile, VllmAssembler
from medialane.vllm_bridge.seams.multimodal import new_processor
from medialane.vllm_bridge.seams.vision_chunk import ChunkSource, name_for_engine
from vllm_configs import model_config

pytestmark = pytest.mark.vllm

TEXT = "<|im_start|>user\n{}{}{}<|im_end|>\n"
PLACEHOLDER = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi")
    write_kimi_k25(folder)
    return model_config(folder, '--limit-mm-per-prompt={"vision_chunk": 3}')


@pytest.fixture(scope="module")
def processor(config):
    return new_processor(config)


@pytest.fixture(scope="module")
def hook(config, processor):
    renderer = SimpleNamespace(model_config=config, get_mm_processor=lambda: processor)
    return RendererHook(
        renderer,
        SimpleNamespace(fail=lambda _: None, resolve=lambda _: MediaRef("image", "here", url="http://x")),
        ModelProfile(processor),
    )


def pictures():
    found = np.random.default_rng(1)
    return [found.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((300, 420), (64, 90))]


def test_images_have_the_tokens_and_tensors_of_vllms_chunks(config, processor):
    plain = MULTIMODAL_REGISTRY.create_processor(config)
    token_ids = plain.info.get_tokenizer().encode(TEXT.format(PLACEHOLDER, "and", PLACEHOLDER))
    chunks = [{"type": "image", "image": PILImage.fromarray(pixels), "uuid": None} for pixels in pictures()]
    data = plain.info.parse_mm_data({"vision_chunk": chunks})
    expected = plain.apply(ProcessorInputs(prompt=token_ids, mm_data_items=data), TimingContext(enabled=False))
    heavy = VllmProcessor(processor)
    made = [heavy.process(Image(pixels), b"{}") for pixels in pictures()]
    features = [Feature("image", f"{n:064x}", item.header, (), item.size) for n, item in enumerate(made)]
    found = VllmAssembler(processor).assemble(token_ids, features, b"{}")
    assert found.token_ids == expected["prompt_token_ids"]
    places = [PlaceholderRange(offset=place.offset, length=place.length) for place in found.placeholders]
    assert name_for_engine({"image": places}) == expected["mm_placeholders"]
    for item, whole in zip(made, expected["mm_kwargs"]["vision_chunk"], strict=True):
        ours = decode_item(item.header, item.buffers)
        assert ours.keys() == whole.keys()
        assert all(torch.equal(ours[name].data, whole[name].data) for name in whole)


def test_all_images_are_processed_one_by_one_and_limited_as_chunks(processor):
    assert ModelProfile(processor).unfit == {}
    assert processor.info.allowed_mm_limits == {"image": 3}


def test_embeddings_of_a_chunk_are_refused(processor):
    with pytest.raises(ValueError, match="not supported"):
        processor.info.parse_mm_data({"image": [torch.zeros(4, 128)]})


async def test_references_pass_through_vllms_chunks(hook):
    source = hook.reference("image", "medialane:0", None)
    other = MediaRef("image", "there", url="http://x")
    chunks, _ = _resolve_vision_chunk_items(
        [(ChunkSource(source), "a uuid"), (ChunkSource(other), None)], None, ["image"] * 2
    )
    assert hook.takes_chunks
    prepared = []

    async def prepare(prompt):
        prepared.append(prompt.items)
        raise InvalidRequest("enough")

    hook.backend.prepare = prepare
    with pytest.raises(InvalidRequest, match="enough"):
        await hook.process([1], {"vision_chunk": chunks}, {"vision_chunk": ["a uuid"]})
    assert prepared == [(source, other)]


def test_videos_are_refused(hook):
    """vLLM itself answers 500: nothing splits them into chunks."""
    with pytest.raises(InvalidRequest, match="videos are not supported"):
        hook.reference("video", "medialane:0", None)


def test_processor_of_preparers_starts_no_threads_of_numba(config):
    """They would not survive the fork."""
    program = """if True:
        import sys, msgspec
        from medialane.prepare.processor import FactoryConfig
        from medialane.vllm_bridge.learned.processor_factory import build_processor
        build_processor(msgspec.json.encode(FactoryConfig(sys.argv[1], [])))
        from numba.np.ufunc import parallel
        print("threads launched:", parallel._is_initialized)
    """
    command = [sys.executable, "-c", program, config.model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "threads launched: False" in done.stdout, done.stderr
