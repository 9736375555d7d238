"""Measures a model's encoder with one small item of each modality, in each process that runs the model.

A check at start, instead of a list of models: the encoder's output must have one row per token of the item's
placeholder that needs an embedding, and a prompt must have the same rotary positions if the item has only its small
fields, which are all that an engine gets of an item whose embedding is loaded.
"""

from __future__ import annotations

from typing import Any, TypedDict

from medialane.types.errors import PreparationFailed
from medialane.vllm_bridge.items.features import decode_small_fields, encode_item, spec_of
from medialane.vllm_bridge.seams.encoder_cache import embeddings_of, mrope_positions, sample_inputs


class Measured(TypedDict):
    """By modality: the width and dtype of embeddings, or why they cannot be kept. Sent as msgpack."""

    widths: dict[str, int]
    dtypes: dict[str, str]
    faults: dict[str, str]


def measure(worker: Any) -> Measured:
    """Return the measurements of this process. Never raises: an engine works without kept embeddings, and its card says
    why it keeps none (whatever the model raised, out of memory included)."""
    measured: Measured = {"widths": {}, "dtypes": {}, "faults": {}}
    try:
        samples = sample_inputs(worker)
    except Exception as error:  # noqa: BLE001 - the model's own code may raise anything
        measured["faults"]["media"] = _reason(error)
        return measured
    for modality, sample in samples.items():
        try:
            spec = _measured(worker, modality, sample)
        except Exception as error:  # noqa: BLE001 - as above
            measured["faults"][modality] = _reason(error)
        else:
            measured["widths"][modality], measured["dtypes"][modality] = spec
    return measured


def _measured(worker: Any, modality: str, sample: Any) -> tuple[int, str]:
    """Return width and dtype. Raises PreparationFailed, or whatever the model raises."""
    (item,), (place,) = sample["mm_kwargs"][modality], sample["mm_placeholders"][modality]
    small = decode_small_fields(encode_item(item)[0])
    token_ids = sample["prompt_token_ids"]
    whole, reduced = (mrope_positions(worker, token_ids, modality=modality, item=i, place=place) for i in (item, small))
    if whole != reduced:
        raise PreparationFailed("rotary positions depend on the item's large fields")
    spec = spec_of(embeddings_of(worker, modality, item))
    if len(spec.shape) != 2 or spec.shape[0] != place.get_num_embeds():
        raise PreparationFailed(f"the encoder's output is {spec.shape} for {place.get_num_embeds()} tokens")
    return spec.shape[1], spec.dtype


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
