"""Validates features before EngineCore, where an inconsistent one would terminate all requests.

Theory of operation. vLLM trusts its input: a placeholder longer than its embeddings, or pixel rows that do not match a
grid, raises in EngineCore and terminates all requests; a shorter placeholder silently gives wrong output. So we compare
the features with what the model's own processor would have produced for the same items, without reading pixels:

* an item's fields, their dtypes and fixed dimensions and, if the request has options, the number of embeddings that
  the model makes of it: learned once from samples (`item_shape`);
* the rows of flat fields, which follow from the small fields (a grid): `fields_config` over the item as a batch of one
  returns slices, which must end exactly where the tensor does;
* the tokens of an item's placeholder, and which of them are replaced by embeddings: `prompt_updates` over the items
  and stand-ins of the true size, compared with the prompt at each placeholder.

All of that depends on headers, sizes and options only, so results are cached: an image of a known size is only compared
with its prompt. This is valid because the checks get stand-ins for tensors outside the header, whose values they cannot
read (`seams.stand_ins`).

The results of vLLM's own renderer in this process (stages `decoded` and `url`) are checked likewise if a request's
options have been applied there (`check_rendered`). Without options they are what plain vLLM sends to its engine.

The methods of vLLM's processor used here are private; `tests/contract/test_vllm_engine_validation.py` pins them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from vllm.inputs import split_enc_dec_input
from vllm.multimodal.inputs import (
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.types.errors import InvalidFeature, PromptRejected
from medialane.types.feature import MediaPayload, PlaceholderRange
from medialane.types.media import Modality
from medialane.types.request import ExpandedPrompt
from medialane.vllm_bridge.items.features import decode_item_without_tensors
from medialane.vllm_bridge.items.header_values import (
    MALFORMED_FEATURE,
    NO_OPTIONS,
    PlaceholderLayout,
    PlaceholderLayouts,
    configs_of,
    decode_options,
)
from medialane.vllm_bridge.items.options import check_worker_options
from medialane.vllm_bridge.items.prepared_input import embed_mask, from_vllm_range
from medialane.vllm_bridge.learned.item_shape import ItemShape, check_grids, check_layout, num_embeds
from medialane.vllm_bridge.seams.multimodal import prompt_updates

#: mm_hash is opaque to us, but it is a key of several caches.
MAX_HASH_CHARS = 256

#: Seconds between two rows of a video's grid, in Qwen2.5-VL and Qwen-Omni.
_FRAME_TIMES = ("second_per_grid_ts", "video_second_per_grid")


class FeatureChecker:
    """Validates expanded prompts for one model, by what `ModelProfile` has learned. Used from the event loop."""

    def __init__(
        self,
        processor: BaseMultiModalProcessor,
        *,
        shapes: Mapping[Modality, ItemShape],
        merge_size: int,
        max_pixels: Mapping[Modality, int],
    ) -> None:
        self._processor = processor
        self._limits = dict(processor.info.allowed_mm_limits)
        self._shapes = shapes
        self._merge = merge_size
        self._max_pixels = max_pixels
        self._max_video_s = max_video_s(processor.info.get_hf_config())
        self._layouts = PlaceholderLayouts(processor)

    def check(self, prompt: ExpandedPrompt, items: Sequence[MultiModalKwargsItem]) -> None:
        """Raise InvalidFeature unless `items`, the prompt's decoded features in order, are consistent and match the
        prompt; an item whose embedding is loaded has its small fields only. Raises PromptRejected if there are more of
        them than the operator allows."""
        features = prompt.features
        places = [placeholder_of(f) for f in features]
        check_ranges(len(prompt.expanded_token_ids), places)
        check_order([f.modality for f in features], places)
        self._check_counts(features)
        if not all(0 < len(feature.mm_hash) <= MAX_HASH_CHARS for feature in features):
            raise InvalidFeature("a feature has no usable mm_hash")
        self._check_placeholders(prompt, self._layout_of(prompt))
        self._check_durations(items)

    def _check_counts(self, features: Sequence[MediaPayload]) -> None:
        for modality, count in Counter(f.modality for f in features).items():
            limit = self._limits.get(modality, 0)
            if count > limit:
                raise PromptRejected(f"At most {limit} {modality}(s) may be provided in one prompt.")

    def _layout_of(self, prompt: ExpandedPrompt) -> PlaceholderLayout:
        def check_items() -> None:
            for feature in prompt.features:
                self.check_item(feature.modality, decode_item_without_tensors(feature.header), prompt.options)

        def confirm(layout: PlaceholderLayout) -> None:
            if prompt.options == NO_OPTIONS:
                return
            defaults = self._layouts.find(prompt.features, NO_OPTIONS).updates
            for modality, items in layout.kwargs.items():
                for item, default, updates in zip(items, defaults[modality], layout.updates[modality], strict=True):
                    for update in updates:
                        self._check_embeds(modality, item, num_embeds(update.content), default)

        try:
            return self._layouts.find(prompt.features, prompt.options, check=check_items, confirm=confirm)
        except MALFORMED_FEATURE as error:
            raise InvalidFeature("the model's processor cannot compute placeholders for these features") from error

    def _check_durations(self, items: Iterable[MultiModalKwargsItem]) -> None:
        """Raise InvalidFeature if the prompt's videos last too long by the time between their frames, which a request's
        `fps` can set: EngineCore computes rotary positions from it, and those outside the model's table end it."""
        try:
            durations = list(map(_duration_s, items))
        except MALFORMED_FEATURE as error:
            raise InvalidFeature("the duration of a video cannot be computed from its fields") from error
        if not (all(duration >= 0 for duration in durations) and sum(durations) <= self._max_video_s):
            raise InvalidFeature(f"the prompt's videos last {sum(durations):g} s, more than {self._max_video_s:g} s")

    def check_item(self, modality: Modality, item: MultiModalKwargsItem, options: bytes | None = None) -> None:
        """Raise InvalidFeature unless an item has the fields, dimensions and rows of the model's own. `options` are
        the options with which it was processed, None if they are not known: by a client."""
        if (shape := self._shapes.get(modality)) is None:
            raise InvalidFeature(f"this worker does not support {modality} features")
        shape.check(modality, item, has_options=options != NO_OPTIONS)
        check_grids(modality, item, self._merge)
        self._check_rows(modality, item, {} if options is None else decode_options(options))

    def check_options(self, options: bytes, modalities: Iterable[Modality]) -> None:
        """Raise InvalidRequest naming an option with which this process may not process such items."""
        check_worker_options(decode_options(options), self._max_pixels, modalities)

    def check_rendered(self, rendered: Mapping[str, Any], media: Mapping[Modality, Any], options: bytes) -> None:
        """Raise InvalidFeature unless the renderer's result for `media` matches the model and the placeholders.

        Items of modalities that are not in `media` are not checked.
        """
        encoder, decoder = split_enc_dec_input(rendered)
        token_ids = (encoder or decoder)["prompt_token_ids"]
        token_ids = decoder.get("encoder_prompt_token_ids", token_ids)
        kwargs: dict[Modality, Any] = {modality: decoder["mm_kwargs"][modality] for modality in media}
        places = {modality: [from_vllm_range(p) for p in decoder["mm_placeholders"][modality]] for modality in media}
        check_ranges(len(token_ids), [place for of in places.values() for place in of])
        for modality, items in kwargs.items():
            if len(items) != len(places[modality]):
                raise InvalidFeature(f"{modality}: {len(items)} items and {len(places[modality])} placeholders")
        self._check_durations(item for items in kwargs.values() for item in items)
        if options != NO_OPTIONS:
            self._check_rendered_items(kwargs, places, media, options)

    def unchanged(self, modalities: Iterable[Modality], options: bytes) -> list[Modality]:
        """Return the modalities whose items must have the same layout as without these options (`check_unchanged`)."""
        if options == NO_OPTIONS:
            return []
        return [m for m in modalities if (shape := self._shapes.get(m)) is not None and shape.measure is None]

    def check_unchanged(
        self, rendered: Mapping[str, Any], default: Mapping[str, Any], modalities: Iterable[Modality]
    ) -> None:
        """Raise InvalidRequest if these items have another layout than in `default`, the result without options."""
        given, expected = (split_enc_dec_input(one)[1]["mm_kwargs"] for one in (rendered, default))
        for modality in modalities:
            for item, plain in zip(given[modality], expected[modality], strict=True):
                check_layout(modality, item, plain)

    def _check_rendered_items(
        self,
        kwargs: Mapping[Modality, Sequence[MultiModalKwargsItem]],
        places: Mapping[Modality, Sequence[PlaceholderRange]],
        media: Mapping[Modality, Any],
        options: bytes,
    ) -> None:
        for modality, items in kwargs.items():
            for item in items:
                self.check_item(modality, item, options)
        try:
            data = self._processor.info.parse_mm_data(media)
            defaults = prompt_updates(self._processor, data, {}, MultiModalKwargsItems(kwargs))
        except MALFORMED_FEATURE as error:
            raise InvalidFeature("the model's processor cannot compute placeholders for these media") from error
        for modality, items in kwargs.items():
            for item, place, default in zip(items, places[modality], defaults[modality], strict=True):
                self._check_embeds(modality, item, place.num_embeds, default)

    def _check_embeds(self, modality: Modality, item: MultiModalKwargsItem, count: int, default: Sequence[Any]) -> None:
        """`default` are the processor's prompt updates without the request's options."""
        shape = self._shapes.get(modality)
        matches = None if shape is None else shape.accepts(item, count)
        if matches is None:
            matches = count in [num_embeds(update.content) for update in default]
        if not matches:
            raise InvalidFeature(f"{modality}: {count} placeholder tokens do not match the number of embeddings")

    def _check_rows(self, modality: str, item: MultiModalKwargsItem, kwargs: Mapping[str, object]) -> None:
        """Raise InvalidFeature unless every flat field has the length implied by the item's other fields."""
        try:
            configs = configs_of(self._processor, item, kwargs)
        except MALFORMED_FEATURE as error:
            raise InvalidFeature(f"{modality}: the fields are not those of an item") from error
        for name, elem in item.items():
            field = configs[name].field
            if type(field) is not type(elem.field) or field.keep_on_cpu != elem.field.keep_on_cpu:
                raise InvalidFeature(f"{modality} {name}: the field is of another kind")
            if isinstance(field, MultiModalFlatField):
                _check_flat(f"{modality} {name}", elem, field)

    def _check_placeholders(self, prompt: ExpandedPrompt, layout: PlaceholderLayout) -> None:
        """Raise InvalidFeature unless the prompt has, at each placeholder, the tokens of the model's own processor."""
        places = [placeholder_of(feature) for feature in prompt.features]
        found = self._layouts.placements(prompt.expanded_token_ids, prompt.features, places, layout)
        wrong = [number for number, place in enumerate(places) if found[number] != place]
        if wrong and not _fits_alone(prompt, layout.updates):
            modality, place = prompt.features[wrong[0]].modality, places[wrong[0]]
            raise InvalidFeature(
                f"{modality}: the prompt's {place.length} tokens at {place.offset} are not those of the feature"
            )


def placeholder_of(feature: MediaPayload) -> PlaceholderRange:
    """Return the feature's placeholder. Raises InvalidFeature if it has none."""
    if feature.placeholder is None:
        raise InvalidFeature("a feature has no placeholder")
    return feature.placeholder


def check_ranges(num_tokens: int, ranges: Sequence[PlaceholderRange]) -> None:
    """Raise InvalidFeature unless the ranges are inside the prompt and no token is assigned two embeddings.

    Ranges are grouped by modality, so not in prompt order. Tokens without an embedding may be shared: Gemma-3's
    newlines after one image and before the next are one token of both, and the tokens of a video's audio (Qwen-Omni)
    are interleaved with its own.
    """
    if (last := max((place.end for place in ranges), default=0)) > num_tokens:
        raise InvalidFeature(f"a placeholder ends at {last}, the prompt at {num_tokens}")
    assigned = np.zeros(num_tokens, bool)
    for place in ranges:
        mask = np.ones(place.length, bool) if place.is_embed is None else np.frombuffer(place.is_embed, bool)
        tokens = assigned[place.offset : place.end]
        if (tokens & mask).any():
            raise InvalidFeature(f"the placeholder at {place.offset} overlaps another")
        tokens |= mask


def check_order(modalities: Sequence[Modality], ranges: Sequence[PlaceholderRange]) -> None:
    """Raise InvalidFeature unless the items of each modality are in prompt order."""
    ends: dict[Modality, int] = {}
    for modality, place in zip(modalities, ranges, strict=True):
        if place.offset <= ends.get(modality, -1):
            raise InvalidFeature(f"{modality}: the placeholder at {place.offset} is out of order")
        ends[modality] = place.offset


def _duration_s(item: MultiModalKwargsItem) -> float:
    """Return how long a video lasts by the time between its frames; 0 if its positions do not depend on that."""
    grid = item.get("video_grid_thw")
    times = [item[name].data for name in _FRAME_TIMES if name in item]
    if grid is None or not times:
        return 0.0
    return float(torch.as_tensor(times[0], dtype=torch.float64).view(-1)[0]) * int(grid.data.view(-1)[0])


def max_video_s(config: Any) -> float:
    """Return how long a video may be by its rotary positions. vLLM's table has four times `max_position_embeddings`
    (`MRotaryEmbedding`); a prompt's other tokens take one at most."""
    config = getattr(config, "thinker_config", config)
    per_second = getattr(getattr(config, "vision_config", None), "tokens_per_second", None)
    per_second = per_second or getattr(config, "position_id_per_seconds", None) or 1.0
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return math.inf if positions is None else 3 * positions / per_second


def _check_flat(name: str, elem: MultiModalFieldElem, field: MultiModalFlatField) -> None:
    size = elem.data.shape[field.dim] if isinstance(elem.data, torch.Tensor) else len(elem.data)
    if len(field.slices) != 1:
        raise InvalidFeature(f"{name}: one item has the rows of {len(field.slices)}")
    (only,) = field.slices
    cut = only[field.dim] if isinstance(only, tuple | list) else only
    if (cut.start or 0, size if cut.stop is None else int(cut.stop), cut.step or 1) != (0, size, 1):
        raise InvalidFeature(f"{name}: {size} rows, but the other fields imply {int(cut.stop)}")


def _fits_alone(prompt: ExpandedPrompt, updates: Any) -> bool:
    """Return whether the prompt belongs to an encode request: one placeholder and at most one token, with the embedded
    tokens of its feature. The tokens around them may contain the item's number in the request that it is part of
    (MiniCPM-V)."""
    if len(prompt.features) != 1:
        return False
    (feature,) = prompt.features
    place, token_ids = placeholder_of(feature), prompt.expanded_token_ids
    if place.offset != 0 or len(token_ids) > place.length + 1:
        return False
    embedded = _embedded(token_ids[: place.length], place.is_embed)
    return any(embedded == _embedded(u.content.full, embed_mask(u.content)) for u in updates[feature.modality][0])


def _embedded(token_ids: Sequence[int], is_embed: bytes | None) -> list[int]:
    """Return the tokens that are replaced by embeddings."""
    return list(token_ids) if is_embed is None else list(compress(token_ids, is_embed))
