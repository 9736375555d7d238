"""The side of the squares of grid cells that a vision encoder merges into one embedding (`spatial_merge_size`).

Theory of operation. An encoder with a grid of patches fails on one that is not made of whole squares, and with it
EngineCore. Families declare the side in different places of their configuration (`vision_config`, `thinker_config`,
the projector) and by different names, so it is learned: cells of some samples' grids divided by their embeddings. A
family may also merge frames (Ernie: two), so the side is the largest whose square divides that ratio. If the ratio
differs between samples, or a sample's grid is not made of such squares, no side is known: 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from math import gcd, isqrt, prod
from typing import Any, NamedTuple

import torch
from vllm.multimodal.inputs import MultiModalFlatField, MultiModalKwargsItem

from medialane.types.errors import InvalidFeature
from medialane.vllm_bridge.items.features import decode_item_without_tensors
from medialane.vllm_bridge.items.header_values import MALFORMED_FEATURE, NO_OPTIONS
from medialane.vllm_bridge.items.item_shape import num_embeds
from medialane.vllm_bridge.items.placeholder_layout import PlaceholderLayouts
from medialane.vllm_bridge.items.trial_items import TrialItem, TrialItems

#: Names of fields of grids end so, in all families of vLLM 0.32 that count embeddings by them. A grid is (frames, rows,
#: columns) or (rows, columns); an item may have several, one for each segment of a video.
_SUFFIXES = ("grid_thw", "grid_thws", "grid_hw", "grid_hws")


#: Well above the 8 cells (2x2, of two frames) of the family that merges most.
_MAX_CELLS_PER_EMBED = 64


class GridSample(NamedTuple):
    """The grids of a sample, and the number of its embeddings."""

    grids: Sequence[Sequence[int]]
    num_embeds: int

    @property
    def cells_per_embed(self) -> Fraction:
        cells = sum(rows * columns * (frames[0] if frames else 1) for *frames, rows, columns in self.grids)
        return Fraction(cells, self.num_embeds)


def learn_merge_size(trial: TrialItems) -> int:
    """Return the side; 1 if the family has no grid, or none can be learned."""
    sides = [common_side([*_samples(trial.layouts, items)]) for items in trial.by_modality.values()]
    return gcd(*[side for side in sides if side is not None]) or 1


def check_grids(modality: str, item: MultiModalKwargsItem, merge: int) -> None:
    """Raise InvalidFeature unless the item's grids consist of whole squares of this side."""
    for name, elem in item.items():
        if name.endswith(_SUFFIXES):
            grids = _grids_in(name, elem.data)
            several = len(grids) > 1 and not isinstance(elem.field, MultiModalFlatField)
            if not grids or several or any(min(grid) < 1 or any(side % merge for side in grid[-2:]) for grid in grids):
                value = elem.data.tolist() if isinstance(elem.data, torch.Tensor) else type(elem.data).__name__
                raise InvalidFeature(f"{modality} {name}: {value} is not a grid of {merge}x{merge} squares")


def min_embeds(item: MultiModalKwargsItem) -> int:
    """Return the fewest embeddings that an item with such grids has in any family; 0 without a grid."""
    grids = [grid for name, elem in item.items() if name.endswith(_SUFFIXES) for grid in _grids_in(name, elem.data)]
    return sum(map(prod, grids)) // _MAX_CELLS_PER_EMBED


def common_side(samples: Sequence[GridSample]) -> int | None:
    """Return the side that all samples of one modality have in common; None if they do not show it."""
    ratios = {sample.cells_per_embed for sample in samples}
    if len(ratios) != 1 or (ratio := ratios.pop()).denominator != 1:
        return None
    side = next(n for n in range(isqrt(int(ratio)), 0, -1) if int(ratio) % n**2 == 0)
    is_whole = all(cells % side == 0 for sample in samples for grid in sample.grids for cells in grid[-2:])
    return side if is_whole else None


def _samples(layouts: PlaceholderLayouts, items: Sequence[TrialItem]) -> Iterator[GridSample]:
    """Yield the grids of items whose placeholder can be computed."""
    for item in items:
        fields = decode_item_without_tensors(item.header).items()
        grids = [grid for name, elem in fields if name.endswith(_SUFFIXES) for grid in _grids_in(name, elem.data)]
        if grids:
            with suppress(*MALFORMED_FEATURE):
                updates = layouts.find([item], NO_OPTIONS).updates[item.modality]
                if count := num_embeds(updates[0][0].content):
                    yield GridSample(grids, count)


def _grids_in(name: str, data: Any) -> list[list[int]]:
    """Return the grids of one field; none if it has another form than its name says."""
    numbers = 2 if name.rstrip("s").endswith("_hw") else 3
    if not isinstance(data, torch.Tensor) or data.is_floating_point() or data.numel() % numbers:
        return []
    return [[int(n) for n in row] for row in data.reshape(-1, numbers).tolist()]
