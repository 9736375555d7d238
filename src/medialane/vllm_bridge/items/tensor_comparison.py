"""Compares the fields of one item between Hugging Face's processor, plain vLLM's and ours.

Theory of operation. Values are compared as flat lists of tensors, since processors nest them in lists. Hugging Face
returns a batch of one item, so a first dimension of 1 that the other has not is ignored. vLLM converts floats to the
model's dtype, so floats of different dtypes are compared in the smaller one. Where vLLM leaves normalisation to the
device, its pixels are normalised here as there, before they are compared with normalised ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch

from medialane.types.tensor import Comparison, FieldComparison, PixelNormalisation, Relation

#: A field's value: tensors and scalars, in nested lists.
Values = Mapping[str, Any]

#: What Hugging Face's processors make of the text.
_OF_TEXT = frozenset(("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"))

#: Normalising takes some roundings of float32 in another order: 5e-7 for values of about 2.
_ROUNDING = 1e-5

_SEVERITY = {relation: number for number, relation in enumerate(get_args(Relation))}
_MAX_FORM_CHARS = 100


def compare_fields(
    plain: Values, ours: Values, hugging_face: Values | None, normalisation: PixelNormalisation | None
) -> tuple[FieldComparison, ...]:
    """Compare all fields of an item, those of plain vLLM first. `normalisation` is the device's; None if there is
    none."""
    theirs = (
        {}
        if hugging_face is None
        else {name: value for name, value in hugging_face.items() if name in plain or name not in _OF_TEXT}
    )
    return tuple(
        FieldComparison(
            name=name,
            plain=_form(plain, name),
            ours=_form(ours, name),
            hugging_face=_form(theirs, name),
            of_ours=_compare(plain, ours, name, normalisation),
            of_hugging_face=None if hugging_face is None else _compare(plain, theirs, name, normalisation),
        )
        for name in dict.fromkeys((*plain, *ours, *theirs))
    )


def _compare(plain: Values, other: Values, name: str, normalisation: PixelNormalisation | None) -> Comparison:
    if name not in plain and name not in other:
        return Comparison("equal")
    if name not in plain or name not in other:
        return Comparison("missing")
    ones, others = list(_leaves(plain[name])), list(_leaves(other[name]))
    if len(ones) != len(others):
        ones, others = _joined(ones), _joined(others)
    if len(ones) != len(others):
        return Comparison("shape")
    compared = [_compare_leaves(*pair, normalisation) for pair in zip(ones, others, strict=True)]
    relations: list[Relation] = [one.relation for one in compared] or ["equal"]
    relation = max(relations, key=_SEVERITY.__getitem__)
    return Comparison(relation, max((one.largest for one in compared), default=0.0))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _joined(leaves: list[Any]) -> list[Any]:
    """Return equal tensors of a list as one, as a processor that stacks them returns them."""
    shapes = {one.shape if isinstance(one, torch.Tensor) else None for one in leaves}
    return [torch.stack(leaves)] if len(leaves) > 1 and len(shapes) == 1 and None not in shapes else leaves


def _compare_leaves(plain: Any, other: Any, normalisation: PixelNormalisation | None) -> Comparison:
    if not isinstance(plain, torch.Tensor) and not isinstance(other, torch.Tensor):
        return Comparison("equal" if plain == other else "differs")
    try:
        one, two = torch.as_tensor(plain), torch.as_tensor(other)
    except (TypeError, ValueError, RuntimeError):  # a string beside a tensor
        return Comparison("differs")
    if one.shape != two.shape:
        one, two = _without_batch(one, two)
    if one.shape != two.shape:
        return Comparison("shape")
    if one.dtype == two.dtype:
        return _differing(one, two, "equal")
    raw, done = (one, two) if one.dtype == torch.uint8 else (two, one)
    if normalisation is not None and raw.dtype == torch.uint8 and done.is_floating_point():
        return _normalised(raw, done, normalisation)
    return _differing(*_in_smaller(one, two), "cast")


def _without_batch(one: torch.Tensor, two: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if two.ndim == one.ndim + 1 and two.shape[0] == 1:
        return one, two[0]
    if one.ndim == two.ndim + 1 and one.shape[0] == 1:
        return one[0], two
    return one, two


def _in_smaller(one: torch.Tensor, two: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both in the dtype of fewer bits, if both are floats; in that which both have in common otherwise."""
    if one.is_floating_point() and two.is_floating_point():
        dtype = min(one.dtype, two.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    else:
        dtype = torch.promote_types(one.dtype, two.dtype)
    return one.to(dtype), two.to(dtype)


def _differing(one: torch.Tensor, two: torch.Tensor, if_equal: Relation) -> Comparison:
    if torch.equal(one, two) or (one.is_floating_point() and torch.allclose(one, two, 0, 0, equal_nan=True)):
        return Comparison(if_equal)
    distance = (one.to(torch.float64) - two.to(torch.float64)).abs().nan_to_num(torch.inf)
    return Comparison("differs", float(distance.max()))


def _normalised(raw: torch.Tensor, done: torch.Tensor, normalisation: PixelNormalisation) -> Comparison:
    expected = normalise(raw, normalisation)
    if expected is None:
        return Comparison("differs")
    made = done.to(torch.float32)
    largest = float((expected - made).abs().max()) if made.numel() else 0.0
    is_equal = largest <= _ROUNDING or torch.equal(expected.to(done.dtype), done)
    return Comparison("normalised" if is_equal else "differs", largest)


def normalise(pixels: torch.Tensor, normalisation: PixelNormalisation) -> torch.Tensor | None:
    """Return raw pixels as vLLM's device has them after `FusedMMInputNorm`, in float32: of patches (rows of channels
    one after another) or of images (channels, rows, columns). None if there is no dimension of channels."""
    channels = len(normalisation.mean)
    if pixels.ndim == 2 and pixels.shape[1] % channels == 0:
        by_channel = pixels.reshape(pixels.shape[0], channels, -1, 1)
    elif pixels.ndim > 2 and pixels.shape[-3] == channels:
        by_channel = pixels
    else:
        return None
    std, mean = (
        torch.tensor(one, dtype=torch.float32).view(channels, 1, 1) for one in (normalisation.std, normalisation.mean)
    )
    return (by_channel * (normalisation.rescale_factor / std) - mean / std).reshape(pixels.shape)


def _form(values: Values, name: str) -> str:
    """Return dtype and shape of a field in a few words; empty if it is missing."""
    if name not in values:
        return ""
    leaves = list(_leaves(values[name]))
    forms = dict.fromkeys(map(_form_of_leaf, leaves))
    text = ", ".join(forms)
    text = f"{len(leaves)} x {text}" if len(leaves) > 1 else text
    return text if len(text) <= _MAX_FORM_CHARS else text[: _MAX_FORM_CHARS - 3] + "..."


def _form_of_leaf(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__
