"""How the tensors of one media item differ between two processors (`medialane check --tensors`)."""

from __future__ import annotations

from typing import Literal

import msgspec

#: From the smallest difference to the largest.
#: `equal`: dtype, shape and every bit. `cast`: the same numbers in another dtype, if necessary rounded to the smaller.
#: `normalised`: one has raw pixels (uint8), and equals the other once they are normalised. `missing`: one has no such
#: field.
Relation = Literal["equal", "cast", "normalised", "differs", "shape", "missing"]


class Comparison(msgspec.Struct, frozen=True):
    """`largest` is the largest absolute difference of two numbers at the same place; 0 if they cannot be compared."""

    relation: Relation
    largest: float = 0.0


class FieldComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One field of an item. `plain` (vLLM's own), `ours` and `hugging_face` are dtype and shape, empty if the field is
    missing. Comparisons are with plain vLLM's; `of_hugging_face` is None if that made nothing of the item."""

    name: str
    plain: str
    ours: str
    hugging_face: str
    of_ours: Comparison
    of_hugging_face: Comparison | None


class PixelNormalisation(msgspec.Struct, frozen=True):
    """What vLLM's engine does to raw pixels on its device: (pixel * rescale_factor - mean) / std, for each channel."""

    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
