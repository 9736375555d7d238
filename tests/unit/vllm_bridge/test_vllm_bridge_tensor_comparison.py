"""Fields of an item compared between processors."""

import pytest
import torch

from medialane.types.tensor import Comparison, PixelNormalisation
from medialane.vllm_bridge.learned import compare_fields
from medialane.vllm_bridge.learned.reference_tensors import normalise

CLIP = PixelNormalisation(1 / 255, (0.48, 0.46, 0.41), (0.27, 0.26, 0.28))
FLOATS = torch.linspace(-2, 2, 24).reshape(2, 12)
PATCHES = torch.arange(24, dtype=torch.uint8).reshape(2, 12) * 10


def compared(plain, other, normalisation=None):
    """How Hugging Face's value of a field compares with plain vLLM's."""
    (field,) = compare_fields({"x": plain}, {"x": plain}, {"x": other}, normalisation)
    assert field.of_ours.relation == "equal"
    return field.of_hugging_face


@pytest.mark.parametrize(
    ("plain", "other", "relation"),
    [
        (FLOATS, FLOATS.clone(), "equal"),
        (FLOATS, FLOATS[None], "equal"),  # a batch of one
        ([FLOATS, FLOATS], torch.stack([FLOATS, FLOATS]), "equal"),
        (FLOATS * torch.nan, FLOATS * torch.nan, "equal"),
        (3, 3, "equal"),
        (torch.tensor(3), [3], "equal"),
        (FLOATS.bfloat16(), FLOATS, "cast"),
        (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32), "cast"),
        (FLOATS, FLOATS + 0.5, "differs"),
        ("a", "b", "differs"),
        ("a", FLOATS, "differs"),
        (FLOATS, FLOATS.reshape(3, 8), "shape"),
        ([FLOATS, FLOATS[:1]], [FLOATS], "shape"),
    ],
)
def test_values_compare(plain, other, relation):
    assert compared(plain, other).relation == relation


def test_largest_difference_is_reported():
    assert compared(FLOATS, FLOATS + torch.tensor([0.0] * 11 + [0.5])) == Comparison("differs", 0.5)
    assert compared(FLOATS, FLOATS * torch.nan).largest == torch.inf


def test_fields_that_only_one_has_are_missing():
    fields = compare_fields({"a": 1}, {"a": 1, "b": 2}, {"c": 3, "input_ids": FLOATS}, None)
    relations = {one.name: (one.of_ours.relation, one.of_hugging_face.relation) for one in fields}
    assert relations == {"a": ("equal", "missing"), "b": ("missing", "equal"), "c": ("equal", "missing")}
    assert [one.plain for one in fields] == ["int", "", ""]


def test_without_a_hugging_face_processor_there_is_no_comparison_with_it():
    (field,) = compare_fields({"a": 1}, {"a": 1}, None, None)
    assert field.of_hugging_face is None


def test_raw_pixels_are_normalised_before_they_are_compared():
    pixels = PATCHES.reshape(2, 3, 4).float() / 255
    done = ((pixels - torch.tensor(CLIP.mean)[:, None]) / torch.tensor(CLIP.std)[:, None]).reshape(2, 12)
    same, rounded = compared(PATCHES, done, CLIP), compared(PATCHES, done.bfloat16(), CLIP)
    assert same.relation == rounded.relation == "normalised"
    assert same.largest < 1e-6
    assert compared(PATCHES, done + 0.1, CLIP).relation == "differs"
    assert compared(PATCHES, done).relation == "differs"  # the engine's device normalises nothing


def test_channels_of_images_and_of_patches_are_found():
    image = PATCHES.reshape(1, 2, 3, 2, 2)
    assert torch.equal(normalise(image, CLIP).reshape(2, 12), normalise(PATCHES, CLIP))
    assert normalise(PATCHES.reshape(2, 2, 6), CLIP) is None
