"""Finds out at start in which form a model accepts embeddings of clients (`image_embeds`).

Theory of operation. Whether a family's parser and its forward pass accept embeddings is only visible in its code:
Gemma-3 asserts that there are none, Pixtral-HF declares the field and raises, which would end the engine. So the output
of the encoder for a small item is given back to the model, in each process that runs it, in each form that we can
check in requests: it is accepted if the model returns exactly that.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch

from medialane.types.errors import InvalidEmbeds
from medialane.types.tensor import UNNAMED
from medialane.vllm_bridge.seams.encoder_cache import embeddings_of, mrope_positions, sample_inputs, sample_of_embeds

#: Names of an object's members: the embeddings of an image, and its grid of patches.
VALUES, GRID = "image_embeds", "image_grid_thw"

MODALITY = "image"


class AcceptedEmbeds(TypedDict):
    """Sent as msgpack. `fields` are those of an item (`UNNAMED`: one tensor with one row per placeholder token); none
    if embeddings are not accepted, and `fault` says why. `width` is that of a row."""

    fields: list[str]
    width: int
    fault: str


def try_embeds(worker: Any) -> AcceptedEmbeds:
    """Return in which form this process accepts embeddings of images. Never raises: an engine works without them."""
    faults = {}
    for fields in ([VALUES, GRID], [UNNAMED]):
        try:
            return AcceptedEmbeds(fields=fields, width=_tried(worker, fields), fault="")
        except Exception as error:  # noqa: BLE001 - the model's own code; the reason is logged by the caller
            faults["object" if GRID in fields else "tensor"] = f"{type(error).__name__}: {error}"[:200]
    fault = "; ".join(f"as one {form}: {why}" for form, why in faults.items())
    return AcceptedEmbeds(fields=[], width=0, fault=fault)


def _tried(worker: Any, fields: list[str]) -> int:
    """Return the width of embeddings. Raises InvalidEmbeds, or whatever the model raises."""
    sample = sample_inputs(worker)[MODALITY]
    (item,), (place,) = sample["mm_kwargs"][MODALITY], sample["mm_placeholders"][MODALITY]
    values = embeddings_of(worker, MODALITY, item).cpu()
    given: Any = {VALUES: values, GRID: item[GRID].data} if GRID in fields else values
    rendered = sample_of_embeds(worker, MODALITY, given)
    (item,), (place,) = rendered["mm_kwargs"][MODALITY], rendered["mm_placeholders"][MODALITY]
    if tuple(item[VALUES].data.shape) != (place.get_num_embeds(), values.shape[-1]):
        raise InvalidEmbeds(f"the placeholder has {place.get_num_embeds()} tokens for {len(values)} embeddings")
    mrope_positions(worker, rendered["prompt_token_ids"], modality=MODALITY, item=item, place=place)
    if not torch.equal(embeddings_of(worker, MODALITY, item).cpu(), values):
        raise InvalidEmbeds("the model changes them")
    return int(values.shape[-1])
