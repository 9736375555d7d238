"""Our split of vLLM's processor, compared with vLLM's own `apply`: ids, ranges and tensors."""

import copy
import json

import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem

from medialane.types.errors import InvalidImage, PromptRejected, PromptTooLong
from medialane.types.feature import Feature
from medialane.types.media import Image, MediaSize
from medialane.vllm_bridge.frontend import take_frontend
from medialane.vllm_bridge.items import VllmProcessor, decode_item, encode_item
from medialane.vllm_bridge.items.header_values import stand_in
from medialane.vllm_bridge.learned import ModelProfile
from medialane.vllm_bridge.learned.item_shape import trial_video
from model_parts import preparers_processor, request_processor

SIZES = [(1024, 768), (500, 333), (28, 28), (1, 57), (333, 3), (3, 333), (97, 1211)]


def pixels(width, height, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def prompt(renderer, num_images):
    part = "<|vision_start|><|image_pad|><|vision_end|>"
    return renderer.tokenizer.encode("<|im_start|>user\nlook " + " and ".join([part] * num_images) + "<|im_end|>\n")


def whole(renderer, ids, arrays, **kwargs):
    """vLLM's result for the whole request."""
    (rendered,) = renderer.render_cmpl(
        [
            {
                "prompt_token_ids": ids,
                "multi_modal_data": {"image": [PILImage.fromarray(a) for a in arrays]},
                "multi_modal_uuids": {"image": [str(i) for i in range(len(arrays))]},
                **kwargs,
            }
        ]
    )
    return rendered


@pytest.fixture(scope="module")
def processor(renderer):
    return VllmProcessor(renderer.get_mm_processor())


@pytest.fixture(scope="module")
def assembler(renderer):
    return ModelProfile(renderer.get_mm_processor()).assembler(max_tokens=8192)


def assert_same(item, expected):
    mine = decode_item(item.header, item.buffers)
    assert mine.keys() == expected.keys()
    for name in mine:
        assert mine[name].data.dtype == expected[name].data.dtype
        assert torch.equal(mine[name].data, expected[name].data), name
        assert type(mine[name].field) is type(expected[name].field)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_single_image_gives_the_same_tensors_as_in_a_request(renderer, processor, size):
    array = pixels(*size)
    expected = whole(renderer, prompt(renderer, 1), [array])
    item = processor.process(Image(array), b"{}")
    assert item.size == MediaSize(width=size[0], height=size[1])
    assert_same(item, expected["mm_kwargs"]["image"][0])


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_prompt_assembled_from_headers_equals_vllm(renderer, processor, assembler, count):
    arrays = [pixels(200 + 90 * i, 400 - 40 * i, seed=i) for i in range(count)]
    ids = prompt(renderer, count)
    expected = whole(renderer, ids, arrays)
    items = [processor.process(Image(a), b"{}") for a in arrays]
    for item, wanted in zip(items, expected["mm_kwargs"]["image"], strict=True):
        assert_same(item, wanted)
    features = tuple(Feature("image", str(i), item.header, (), item.size) for i, item in enumerate(items))
    assembled = assembler.assemble(ids, features, b"{}")
    assert assembled.token_ids == expected["prompt_token_ids"]
    ranges = [(p.offset, p.length, p.is_embed) for p in expected["mm_placeholders"]["image"]]
    assert [(p.offset, p.length, p.is_embed) for p in assembled.placeholders] == ranges


@pytest.mark.parametrize("size", [*SIZES, (4, 40), (40, 4), (3, 300), (300, 3)], ids=str)
def test_tensor_input_gives_the_same_tensors_as_in_a_request(renderer, size):
    profile = ModelProfile(renderer.get_mm_processor())
    assert profile.accepts_tensors  # this model's image processor is torch-based: the fast path is used
    processor = request_processor(profile)
    array = pixels(*size)
    assert_same(
        processor.process(Image(array), b"{}"), whole(renderer, prompt(renderer, 1), [array])["mm_kwargs"]["image"][0]
    )


def inverted(image):
    return PILImage.fromarray(255 - image.permute(1, 2, 0).numpy())


def without_pillows_methods(image):
    return image.convert("RGB")


@pytest.mark.parametrize("change", [inverted, without_pillows_methods])
def test_processor_with_different_results_for_tensors_gets_pillow_images(renderer, change):
    def parse(media):
        items = media["image"]
        return own({"image": [change(item) if isinstance(item, torch.Tensor) else item for item in items]})

    engine_processor = copy.copy(renderer.get_mm_processor())
    engine_processor.info = copy.copy(engine_processor.info)
    own = engine_processor.info.parse_mm_data
    engine_processor.info.parse_mm_data = parse
    profile = ModelProfile(engine_processor)
    assert not profile.accepts_tensors
    array = pixels(200, 100)
    expected = whole(renderer, prompt(renderer, 1), [array])
    item = VllmProcessor(engine_processor).process(Image(array), b"{}")
    assert_same(item, expected["mm_kwargs"]["image"][0])


@pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning")
def test_processor_options_reach_the_processor(renderer, processor):
    array = pixels(800, 600)
    options = {"max_pixels": 200 * 200}
    expected = whole(renderer, prompt(renderer, 1), [array], mm_processor_kwargs=options)
    item = processor.process(Image(array), b'{"max_pixels":40000}')
    assert_same(item, expected["mm_kwargs"]["image"][0])
    assert item.specs != processor.process(Image(array), b"{}").specs


def test_image_rejected_by_the_model_is_a_client_error(processor):
    with pytest.raises(InvalidImage):
        processor.process(Image(pixels(1000, 2)), b"{}")  # an aspect ratio over 200


@pytest.mark.parametrize("options", [b"{}", b'{"max_pixels":40000}'], ids=str)
def test_processor_out_of_memory_is_no_client_error(renderer, processor, monkeypatch, options):
    """vLLM raises a ValueError for whatever Hugging Face's processor has raised."""

    def out_of_memory(*_args, **_kwargs):
        raise MemoryError

    images = type(renderer.get_mm_processor().info.get_hf_processor().image_processor)
    monkeypatch.setattr(images, "__call__", out_of_memory)
    with pytest.raises(MemoryError):
        processor.process(Image(pixels(64, 64)), options)


@pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning")
def test_items_with_different_options_are_placed_by_their_grids(renderer, processor, assembler):
    assert assembler.accepts_item_options
    array = pixels(800, 600)
    small, large = processor.process(Image(array), b'{"max_pixels":40000}'), processor.process(Image(array), b"{}")
    features = tuple(Feature("image", str(n), i.header, (), i.size) for n, i in enumerate((small, large)))
    assembled = assembler.assemble(prompt(renderer, 2), features, b"{}")
    grids = [decode_item(i.header, i.buffers)["image_grid_thw"].data.prod().item() for i in (small, large)]
    assert [place.length for place in assembled.placeholders] == [grid // 4 for grid in grids]
    assert grids[0] < grids[1]


def test_prompt_without_its_placeholder_is_rejected(renderer, processor, assembler):
    item = processor.process(Image(pixels(64, 64)), b"{}")
    with pytest.raises(PromptRejected):
        assembler.assemble([1, 2, 3], (Feature("image", "a", item.header, (), item.size),), b"{}")


@pytest.mark.parametrize("grid", [[1, 4000, 4000], [1, 1 << 30, 1 << 30]])
def test_header_claiming_more_tokens_than_a_prompt_may_have_is_not_expanded(renderer, processor, assembler, grid):
    """A preparer that a hostile file controls could make the gateway build a list of 10^17 tokens."""
    made = processor.process(Image(pixels(64, 64)), b"{}")
    item = decode_item(made.header, made.buffers)
    forged = MultiModalKwargsItem(
        {**item, "image_grid_thw": MultiModalFieldElem(torch.tensor(grid), item["image_grid_thw"].field)}
    )
    features = (Feature("image", "a", encode_item(forged)[0], (), made.size),)
    with pytest.raises(PromptTooLong, match="longer than the maximum model length of 8192"):
        assembler.assemble(prompt(renderer, 1), features, b"{}")


def test_assembly_does_not_change_the_processor(renderer, processor, assembler):
    item = processor.process(Image(pixels(64, 64)), b"{}")
    before = dict(vars(renderer.get_mm_processor()))
    assembler.assemble(prompt(renderer, 1), (Feature("image", "a", item.header, (), item.size),), b"{}")
    assert dict(vars(renderer.get_mm_processor())) == before


def test_stand_in_has_a_size_but_no_memory():
    image = stand_in("image", MediaSize(width=4000, height=3000))
    assert image.shape == (3000, 4000, 3)
    assert image.base.nbytes == 3


def test_only_families_keeping_the_cached_hf_step_may_be_split(renderer):
    assert not ModelProfile(renderer.get_mm_processor()).unfit
    overriding = copy.copy(renderer.get_mm_processor())
    overriding.__class__ = type("Overriding", (type(overriding),), {"_cached_apply_hf_processor": lambda self: None})
    profile = ModelProfile(overriding)
    assert profile.unfit.keys() == {"image", "video"}
    assert "number of items" in profile.unfit_reason


@pytest.mark.timeout(120)
@pytest.mark.parametrize("modality", ["image", "video"])
def test_model_whose_requests_may_have_no_items_of_a_modality_is_served(tiny_model, modality):
    limit = json.dumps({modality: 0})
    args = ["--max-model-len=8192", "--enforce-eager", f"--limit-mm-per-prompt={limit}"]
    frontend = take_frontend(str(tiny_model), args)
    assert frontend.profile.unfit == {}
    assert frontend.profile.checker
    frontend.renderer.shutdown()
    prepared = preparers_processor(tiny_model, *args)
    media = Image(np.zeros((56, 56, 3), np.uint8)) if modality == "video" else trial_video()
    assert prepared.process(media, b"{}").specs
