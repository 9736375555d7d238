"""Grids of patches: what the samples' cells and embeddings show, and which grids an encoder can merge."""

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
)

from medialane.types.errors import InvalidFeature
from medialane.vllm_bridge.learned.item_shape import GridSample, check_grids, common_side


@pytest.mark.parametrize(
    ("samples", "side"),
    [
        ([GridSample([[1, 4, 4]], 4), GridSample([[1, 2, 6]], 3)], 2),
        ([GridSample([[1, 6, 9]], 6)], 3),
        ([GridSample([[4, 4, 4]], 8)], 2),  # two frames are merged as well
        ([GridSample([[1, 4, 4], [1, 4, 4]], 8)], 2),  # two segments of a video
        ([GridSample([[4, 4]], 4)], 2),  # rows and columns only
        ([GridSample([[1, 3, 5]], 15)], 1),
        ([GridSample([[1, 4, 4]], 4), GridSample([[1, 4, 4]], 5)], None),  # tokens that are not merged cells
        ([GridSample([[1, 1, 16]], 4)], None),  # not squares
        ([GridSample([[1, 3, 4]], 5)], None),
        ([], None),
    ],
)
def test_side_follows_from_cells_and_embeddings(samples, side):
    assert common_side(samples) == side


FLAT = MultiModalFlatField(slices=[slice(0, 2)], dim=0)


@pytest.mark.parametrize(
    ("name", "data", "field"),
    [
        ("image_grid_thw", [1, 4, 6], MultiModalBatchedField()),
        ("video_grid_thw", [[1, 4, 6], [1, 2, 2]], FLAT),
        ("image_grid_hws", [4, 6], MultiModalBatchedField()),
        ("second_per_grid_ts", [0.5], MultiModalBatchedField()),
    ],
)
def test_whole_squares_are_accepted(name, data, field):
    check_grids("image", MultiModalKwargsItem({name: MultiModalFieldElem(torch.tensor(data), field)}), 2)


@pytest.mark.parametrize(
    ("name", "data", "field"),
    [
        ("image_grid_thw", [1, 3, 6], MultiModalBatchedField()),
        ("image_grid_thw", [0, 2, 2], MultiModalBatchedField()),
        ("image_grid_thw", [2, 2], MultiModalBatchedField()),
        ("image_grid_thw", [1.0, 2.0, 2.0], MultiModalBatchedField()),
        ("image_grid_thw", [1, 2, 2, 1, 2, 2], MultiModalBatchedField()),
        ("video_grid_thw", [[1, 4, 6], [1, 2, 3]], FLAT),
        ("grid_thws", [1, 3, 6], MultiModalBatchedField()),
        ("image_grid_hws", [3, 6], MultiModalBatchedField()),
    ],
)
def test_grid_that_an_encoder_cannot_merge_is_rejected(name, data, field):
    with pytest.raises(InvalidFeature, match="is not a grid of 2x2 squares"):
        check_grids("image", MultiModalKwargsItem({name: MultiModalFieldElem(torch.tensor(data), field)}), 2)
