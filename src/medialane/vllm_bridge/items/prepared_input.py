"""Converts a prepared prompt to vLLM's engine input, and back.

vLLM's app passes an engine input from its renderer to `EngineClient.generate`. In between, truncation creates new token
ids and placeholders, and beam search creates new inputs with the `mm_kwargs` of the first. So the prepared prompt is
passed as those `mm_kwargs`, which the app does not access.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from vllm.inputs import mm_enc_dec_input, mm_input, split_enc_dec_input
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing.processor import PromptUpdateDetails

from medialane.types.errors import InvalidRequest
from medialane.types.feature import MediaSpan, PlacedFeature, PreparedPrompt
from medialane.types.feature import PlaceholderRange as Placeholder


class PreparedItems(MultiModalKwargsItems):  # type: ignore[misc]  # vllm is not typed
    """The `mm_kwargs` of a prepared prompt: its items, without data.

    `num_tokens` are the items', by modality, as soon as a worker has expanded the prompt.
    """

    def __init__(self, prepared: PreparedPrompt) -> None:
        items: dict[str, list[None]] = {}
        for placed in prepared.features:
            items.setdefault(placed.feature.modality, []).append(None)
        super().__init__(items)
        self.prepared = prepared
        self.num_tokens: dict[str, int] = {}


def note_placed(prompt: Mapping[str, Any], placed: Sequence[MediaSpan]) -> None:
    """Record where a worker has placed the items of a decoder's input."""
    items = prompt.get("mm_kwargs")
    if isinstance(items, PreparedItems):
        num_tokens = Counter[str]()
        for span in placed:
            num_tokens[span.modality] += span.length
        items.num_tokens.update(num_tokens)  # not added: several inputs of a beam search have these items


def expected_num_tokens(engine_input: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the dict that will have the tokens of the items by modality, if a worker expands the prompt."""
    items = engine_input.get("mm_kwargs")
    return items.num_tokens if isinstance(items, PreparedItems) and not items.prepared.features else None


def engine_input(prepared: PreparedPrompt) -> Any:
    """Return what vLLM's processor would return for a prepared prompt. If it has no features, its items are not placed
    yet."""
    hashes: dict[str, list[str]] = {}
    placeholders: dict[str, list[PlaceholderRange]] = {}
    for placed, mm_hash in zip(prepared.features, prepared.mm_hashes, strict=False):  # without features, none is placed
        modality = placed.feature.modality
        hashes.setdefault(modality, []).append(mm_hash)
        placeholders.setdefault(modality, []).append(to_vllm_range(placed.placeholder))
    encoder_token_ids = prepared.encoder_token_ids
    if encoder_token_ids is None:
        return mm_input(prepared.token_ids, PreparedItems(prepared), hashes, placeholders)
    encoder_prompt = mm_input(encoder_token_ids, PreparedItems(prepared), hashes, placeholders)
    return mm_enc_dec_input(encoder_prompt, prepared.token_ids)


def decoder_input(engine_input: Any) -> Any:
    """Return the part of an engine input that has the tokens of the decoder and the items; for models without an
    encoder prompt, all of it."""
    return split_enc_dec_input(engine_input)[1]


def prepared_prompt(prompt: Mapping[str, Any]) -> PreparedPrompt | None:
    """Return the prepared prompt of a decoder's input, with vLLM's placeholders (truncation may have moved them); None
    for text. Raises InvalidRequest for media that do not come from `engine_input`."""
    if prompt["type"] == "token":
        return None
    if not isinstance(prompt["mm_kwargs"], PreparedItems):
        raise InvalidRequest("media given as processed tensors are not supported by this gateway")
    prepared = prompt["mm_kwargs"].prepared
    if not prepared.features:
        return prepared
    ranges = {modality: iter(places) for modality, places in prompt["mm_placeholders"].items()}
    features = tuple(_moved(placed, next(ranges[placed.feature.modality]).offset) for placed in prepared.features)
    return msgspec.structs.replace(prepared, features=features)


def to_vllm_range(placeholder: Placeholder) -> PlaceholderRange:
    mask = placeholder.is_embed
    is_embed = None if mask is None else torch.frombuffer(bytearray(mask), dtype=torch.uint8).bool()
    return PlaceholderRange(offset=placeholder.offset, length=placeholder.length, is_embed=is_embed)


def from_vllm_range(place: Any) -> Placeholder:
    mask = None if place.is_embed is None else mask_of(place.is_embed)
    return Placeholder(offset=place.offset, length=place.length, is_embed=mask)


def mask_of(is_embed: torch.Tensor) -> bytes:
    """Return `PlaceholderRange.is_embed`."""
    return bytes(is_embed.to(torch.uint8).numpy())


def embed_mask(content: PromptUpdateDetails) -> bytes | None:
    """Return `PlaceholderRange.is_embed` of the placeholder of a prompt update."""
    return None if content.is_embed is None else mask_of(content.is_embed(content.full))


def _moved(placed: PlacedFeature, offset: int) -> PlacedFeature:
    if offset == placed.placeholder.offset:
        return placed
    return PlacedFeature(placed.feature, msgspec.structs.replace(placed.placeholder, offset=offset))
