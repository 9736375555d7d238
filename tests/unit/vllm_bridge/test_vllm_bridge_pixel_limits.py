"""Where processors declare their pixel limits. Whether they are in force is tried in `tests/contract`."""

from types import SimpleNamespace

import pytest
from transformers.image_utils import SizeDict

from medialane.vllm_bridge.learned.sized_headers import declared_limit


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"size": {"longest_edge": 1000, "shortest_edge": 10}}, 1000),
        ({"size": SizeDict(longest_edge=1000)}, 1000),
        ({"size": SizeDict(max_pixels=1000)}, 1000),
        ({"size": {"max_pixels": 1000.0, "longest_edge": 64}}, 1000),
        ({"max_pixels": 1000, "size": None}, 1000),
        ({"max_pixels": None, "size": {"longest_edge": 1000}}, 1000),
        ({"size": None}, None),
        ({"size": 448}, None),
        ({"size": [448, 448]}, None),
        ({"size": {}}, None),
        ({"size": SizeDict(height=448, width=448)}, None),
        ({"size": {"height": 448, "width": 448}}, None),
        ({"size": {"longest_edge": None}}, None),
        ({"size": {"longest_edge": "large"}}, None),
        ({"size": {"longest_edge": -1}}, None),
        ({"max_pixels": True}, None),
        ({}, None),
    ],
    ids=str,
)
def test_limit_is_read_from_any_form_of_size(part, expected):
    assert declared_limit("image", SimpleNamespace(**part), {}) == expected


@pytest.mark.parametrize(
    ("operators", "expected"),
    [
        ({"images_kwargs": {"max_pixels": 5}, "max_pixels": 6}, 5),
        ({"images_kwargs": None, "size": {"longest_edge": 6}}, 6),
        ({"images_kwargs": {}, "size": None}, 7),
        ({"size": 448}, 7),
        ({"videos_kwargs": {"max_pixels": 5}}, 7),
    ],
    ids=str,
)
def test_limit_of_the_operator_comes_first(operators, expected):
    assert declared_limit("image", SimpleNamespace(size={"longest_edge": 7}), operators) == expected
