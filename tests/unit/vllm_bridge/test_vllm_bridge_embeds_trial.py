"""The trial of client embeddings: a form is accepted if the model gives back exactly what it was given."""

from types import SimpleNamespace

import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange

from medialane.types.tensor import UNNAMED
from medialane.vllm_bridge.engine.engine_core import try_embeds
from medialane.vllm_bridge.engine.unexpanded_prompt import GRID, MODALITY, VALUES

OUTPUT = torch.arange(12.0).reshape(6, 2)


def prompt(num_tokens=6, **fields):
    item = {name: SimpleNamespace(data=data) for name, data in fields.items()}
    place = PlaceholderRange(offset=0, length=num_tokens)
    return {"mm_kwargs": {MODALITY: [item]}, "mm_placeholders": {MODALITY: [place]}, "prompt_token_ids": [1]}


class FakeEncoder:
    """A `WorkerEncoder` of a model whose parser and forward pass are the given functions."""

    def __init__(self, parse, forward=lambda values: values, *, has_grid=True):
        self._parse, self._forward = parse, forward
        self._sample = prompt(pixel_values=OUTPUT, **({GRID: torch.tensor([1, 4, 6])} if has_grid else {}))

    def sample_inputs(self):
        return {MODALITY: self._sample}

    def sample_of_embeds(self, _modality, given):
        return self._parse(given)

    def mrope_positions(self, _token_ids, **_item):
        return None

    def embeddings_of(self, _modality, item):
        return self._forward(item[VALUES].data) if VALUES in item else OUTPUT


def tried(*model, **how):
    """What is found of a `FakeEncoder` with these functions."""
    return try_embeds(None, lambda _: FakeEncoder(*model, **how))


def as_object(given):
    assert set(given) == {VALUES, GRID}
    return prompt(**given)


def as_tensor(given):
    return prompt(**{VALUES: given + 0})


def test_object_with_a_grid_is_accepted():
    assert tried(as_object) == {"fields": [VALUES, GRID], "width": 2, "fault": ""}


@pytest.mark.parametrize("has_grid", [True, False])
def test_single_tensor_is_accepted(has_grid):
    assert tried(as_tensor, has_grid=has_grid) == {"fields": [UNNAMED], "width": 2, "fault": ""}


def refuse(_):
    raise AssertionError("no embeddings here")


@pytest.mark.parametrize(
    ("parse", "forward", "fault"),
    [
        (refuse, lambda values: values, "AssertionError: no embeddings here"),
        (as_tensor, refuse, "AssertionError: no embeddings here"),
        (as_tensor, lambda values: values + 1, "the model changes them"),
        (as_tensor, lambda values: values[:3], "the model changes them"),
        (lambda given: prompt(5, **{VALUES: OUTPUT}), lambda values: values, "5 tokens for 6 embeddings"),
    ],
    ids=["parser", "forward", "changed", "fewer", "placeholder"],
)
def test_model_that_does_not_take_them_as_they_are_accepts_none(parse, forward, fault):
    found = tried(parse, forward, has_grid=False)
    assert (found["fields"], found["width"]) == ([], 0)
    assert fault in found["fault"]
