"""Pixel limits: a client may lower the operator's and the model's, never raise them."""

import json

import pytest
from file_less_processors import without_files
from tiny_families import FAMILIES, family_params
from vllm.multimodal import MULTIMODAL_REGISTRY

from medialane.types.errors import InvalidRequest
from medialane.vllm_bridge.items import item_options
from medialane.vllm_bridge.learned import ModelProfile
from medialane.vllm_bridge.learned.sized_headers import is_pixel_limit
from vllm_configs import model_config

PARAM = "messages[0].content[0].image_url"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, {"image": 12_845_056, "video": 12_845_056}),
        ({"max_pixels": 200_704}, {"image": 200_704, "video": 200_704}),
        ({"size": {"shortest_edge": 3136, "longest_edge": 100_352}}, {"image": 100_352, "video": 100_352}),
        ({"images_kwargs": {"max_pixels": 200_704}}, {"image": 200_704, "video": 12_845_056}),
    ],
)
def test_limit_is_the_operators_or_the_models(tiny_model, options, expected):
    args = ["--max-model-len=8192"] + ([] if options is None else [f"--mm-processor-kwargs={json.dumps(options)}"])
    config = model_config(tiny_model, *args)
    assert ModelProfile(MULTIMODAL_REGISTRY.create_processor(config)).max_pixels == expected


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "modality", "limit", "expected"),
    [
        ("qwen2_5_vl", "image", 12_845_056, True),
        ("qwen2_5_vl", "image", 1536, False),  # a side, not a number of pixels
        ("qwen3_vl", "image", 1 << 20, True),
        ("qwen2_5_omni", "video", 1 << 20, True),  # its defaults are other ones
        ("qwen2_5_omni", "video", 1536, False),
    ],
)
def test_limit_of_another_kind_is_not_used(family_renderer, name, modality, limit, expected):
    profile = ModelProfile(family_renderer(name).get_mm_processor())
    assert is_pixel_limit(profile.processor, profile.trial.by_modality[modality][-1], limit) == expected


@pytest.mark.timeout(120)  # creates the family's checkpoint and renderer
@pytest.mark.parametrize("name", family_params())
def test_families_with_pixel_limits(family_renderer, name):
    assert bool(ModelProfile(family_renderer(name).get_mm_processor()).max_pixels) == FAMILIES[name].has_pixel_limits


@pytest.mark.parametrize(
    ("item", "most", "expected"),
    [
        ({}, 100, {}),
        ({"max_pixels": 50}, 100, {"max_pixels": 50}),
        ({"max_pixels": 150}, 100, {"max_pixels": 100}),
        ({"min_pixels": 20, "max_pixels": 50}, 100, {"min_pixels": 20, "max_pixels": 50}),
        ({"min_pixels": 100}, 100, {"min_pixels": 100}),
        ({"min_pixels": 20, "max_pixels": 50}, None, {}),
    ],
)
def test_item_options_can_only_lower_the_limit(item, most, expected):
    assert json.loads(item_options(json.dumps(item).encode(), most, PARAM)) == expected


@pytest.mark.parametrize(("item", "most"), [({"min_pixels": 101}, 100), ({"min_pixels": 51, "max_pixels": 50}, 100)])
def test_min_pixels_above_max_pixels_is_rejected(item, most):
    with pytest.raises(InvalidRequest) as raised:
        item_options(json.dumps(item).encode(), most, PARAM)
    assert raised.value.param == f"{PARAM}.min_pixels"


def test_model_without_a_hugging_face_processor_has_no_limits(tiny_model):
    """vLLM's own processor of the family never loads one: the model has no files for it."""
    config = model_config(tiny_model, "--max-model-len=8192")
    processor = without_files(MULTIMODAL_REGISTRY.create_processor(config))
    assert ModelProfile(processor).max_pixels == {}
