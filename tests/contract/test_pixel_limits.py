"""Pixel limits: a client may lower those of operator and model, never raise them."""

import json

import pytest
from vllm.multimodal import MULTIMODAL_REGISTRY

from medialane.core.errors import InvalidRequest
from medialane.vllm_bridge.arguments import create_model_config, parse_vllm_args
from medialane.vllm_bridge.pixel_limits import item_options, max_pixels_of

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
    config = create_model_config(parse_vllm_args(str(tiny_model), args))
    assert max_pixels_of(MULTIMODAL_REGISTRY.create_processor(config)) == expected


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
