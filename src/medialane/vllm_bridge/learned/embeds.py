"""Embeddings sent by clients (`image_embeds`), in the form in which vLLM's chat parser passes them to its renderer.

Theory of operation. The input is typed (`types.tensor`); vLLM's own loader, which unpickles, is not used. vLLM then
trusts shapes: a grid determines the number of placeholder tokens, and embeddings whose rows do not match it crash
EngineCore with all its requests. So embeddings are checked twice: each item before vLLM gets it, and the renderer's
result against the placeholders.

In which form a model accepts embeddings, if in any, is found by a trial at start (`try_embeds`), not by its family.

Finds out at start in which form a model accepts embeddings of clients (`image_embeds`).

Theory of operation. Whether a family's parser and its forward pass accept embeddings is only visible in its code:
Gemma-3 asserts that there are none, Pixtral-HF declares the field and raises, which would end the engine. So the output
of the encoder for a small item is given back to the model, in each process that runs it, in each form that we can
check in requests: it is accepted if the model returns exactly that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypedDict

import torch

from medialane.types.errors import InvalidEmbeds
from medialane.types.media import Modality
from medialane.types.tensor import UNNAMED, Embeds
from medialane.vllm_bridge.items.features import tensor_over
from medialane.vllm_bridge.learned.model_profile import ModelProfile
from medialane.vllm_bridge.seams.encoder_cache import WorkerEncoder
from medialane.vllm_bridge.seams.multimodal import embeds_data

#: Names of an object's members: the embeddings of an image, and its grid of patches.
VALUES, GRID = "image_embeds", "image_grid_thw"

MODALITY = "image"


class AcceptedEmbeds(TypedDict):
    """Sent as msgpack. `fields` are those of an item (`UNNAMED`: one tensor with one row per placeholder token); none
    if embeddings are not accepted, and `fault` says why. `width` is that of a row."""

    fields: list[str]
    width: int
    fault: str


def try_embeds(worker: Any, encoder_of: Callable[[Any], WorkerEncoder] = WorkerEncoder) -> AcceptedEmbeds:
    """Return in which form this process, which `worker` is, accepts embeddings of images. Never raises:
    an engine works without them."""
    faults = {}
    for fields in ([VALUES, GRID], [UNNAMED]):
        try:
            return AcceptedEmbeds(fields=fields, width=_tried(encoder_of(worker), fields), fault="")
        except Exception as error:  # noqa: BLE001 - the model's own code; the reason is logged by the caller
            faults["object" if GRID in fields else "tensor"] = f"{type(error).__name__}: {error}"[:200]
    fault = "; ".join(f"as one {form}: {why}" for form, why in faults.items())
    return AcceptedEmbeds(fields=[], width=0, fault=fault)


def _tried(encoder: WorkerEncoder, fields: list[str]) -> int:
    """Return the width of embeddings. Raises InvalidEmbeds, or whatever the model raises."""
    sample = encoder.sample_inputs()[MODALITY]
    (item,), (place,) = sample["mm_kwargs"][MODALITY], sample["mm_placeholders"][MODALITY]
    values = encoder.embeddings_of(MODALITY, item).cpu()
    given: Any = {VALUES: values, GRID: item[GRID].data} if GRID in fields else values
    rendered = encoder.sample_of_embeds(MODALITY, given)
    (item,), (place,) = rendered["mm_kwargs"][MODALITY], rendered["mm_placeholders"][MODALITY]
    if tuple(item[VALUES].data.shape) != (place.get_num_embeds(), values.shape[-1]):
        raise InvalidEmbeds(f"the placeholder has {place.get_num_embeds()} tokens for {len(values)} embeddings")
    encoder.mrope_positions(rendered["prompt_token_ids"], modality=MODALITY, item=item, place=place)
    if not torch.equal(encoder.embeddings_of(MODALITY, item).cpu(), values):
        raise InvalidEmbeds("the model changes them")
    return int(values.shape[-1])


_GRID_NUMBERS = 3


class EmbedsReader:
    """Reads and checks embeddings for one model."""

    def __init__(self, profile: ModelProfile, accepted: AcceptedEmbeds | None) -> None:
        """`accepted` is None if the model has not been tried: it then accepts none."""
        self._processor = profile.processor
        self._is_on = bool(self._processor.info.ctx.model_config.multimodal_config.enable_mm_embeds)
        self._width = 0 if accepted is None else accepted["width"]
        self._fields = set() if accepted is None else set(accepted["fields"])
        self._merge = profile.merge_size

    def read(self, modality: Modality, embeds: Embeds) -> dict[str, torch.Tensor]:
        """Return one item's tensors, over the received bytes without a copy. Raises InvalidEmbeds."""
        if not self._is_on:
            raise InvalidEmbeds(f"this server does not support {modality}_embeds (--enable-mm-embeds)")
        if modality != MODALITY or not self._fields:
            raise InvalidEmbeds(f"{modality}_embeds of this model are not supported by this gateway")
        if embeds.fields.keys() != self._fields:
            names = " and ".join(sorted(self._fields)) if UNNAMED not in self._fields else "one tensor without a name"
            raise InvalidEmbeds(f"{modality}_embeds of this model must be {names}")
        tensors = {name: tensor_over(sent.spec, memoryview(sent.data)) for name, sent in embeds.fields.items()}
        if UNNAMED in tensors:
            return {UNNAMED: self._rows(tensors[UNNAMED])}
        rows = self._rows(tensors[VALUES])
        return {VALUES: rows, GRID: self._grid(tensors[GRID], num_rows=len(rows))}

    def data(self, modality: Modality, items: Sequence[Mapping[str, torch.Tensor]]) -> Any:
        """Return all items of one modality as vLLM's renderer expects them."""
        given = [item[UNNAMED] if UNNAMED in item else dict(item) for item in items]
        return embeds_data(modality, given, self._processor)

    def check(self, modality: Modality, engine_input: Mapping[str, Any], num_items: int) -> None:
        """Raise InvalidEmbeds unless each item has one embedding per token of its placeholder that needs one."""
        items, places = engine_input["mm_kwargs"][modality], engine_input["mm_placeholders"][modality]
        if not len(items) == len(places) == num_items:
            raise InvalidEmbeds(f"{len(items)} items and {len(places)} placeholders of {num_items} embeddings")
        for item, place in zip(items, places, strict=True):
            expected = (place.get_num_embeds(), self._width)
            values = item[VALUES].data if VALUES in item else None
            if not isinstance(values, torch.Tensor) or tuple(values.shape) != expected:
                raise InvalidEmbeds(f"{modality}: embeddings do not have the shape {expected} of their placeholder")

    def _rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return the embeddings as (tokens, hidden size). Also accepts a batch of one, like vLLM."""
        if not values.is_floating_point():
            raise InvalidEmbeds("embeddings must be floating-point numbers")
        shape = tuple(values.shape)
        if shape[-1:] != (self._width,) or len(shape) not in (2, 3) or shape[:-2] not in ((), (1,)):
            raise InvalidEmbeds(f"embeddings must have the shape (tokens, {self._width})")
        return values.view(shape[-2:])

    def _grid(self, grid: torch.Tensor, *, num_rows: int) -> torch.Tensor:
        """Return (frames, rows, columns) of patches as a vector, for any input shape."""
        if grid.dtype != torch.int64 or grid.numel() != _GRID_NUMBERS:
            raise InvalidEmbeds(f"{GRID} must be three integers (int64)")
        numbers = grid.view(-1).tolist()
        if min(numbers) < 1 or any(n % self._merge for n in numbers[1:]):
            raise InvalidEmbeds(f"{GRID} must be positive, rows and columns multiples of {self._merge}")
        if prod(numbers) != num_rows * self._merge**2:
            raise InvalidEmbeds(f"{GRID} does not match the number of embeddings")
        return grid.view(-1)
