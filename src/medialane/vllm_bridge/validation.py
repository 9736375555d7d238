"""The last gate before EngineCore, where a feature that contradicts itself ends every request at once.

Theory of operation. vLLM believes what it is given: a placeholder longer than its embeddings, or pixel rows that do not
match a grid, is an exception in EngineCore and the end of all requests; a shorter placeholder is silent garbage. So we
ask the model's own processor what it would have made of the same items, which costs no pixels:

* which fields an item has, their dtypes and fixed dimensions, and with options of the request also how many embeddings
  the model makes of it: learned once from samples (`item_shape`);
* how the rows of flat fields follow from the small fields (a grid): `fields_config` over the item as a batch of one
  gives slices, which must end exactly where the tensor does;
* which tokens stand for an item and which of them take embeddings: `prompt_updates` over the items and
  stand-ins of the true size, compared with the prompt at each placeholder.

What is asked about is the features' headers, sizes and options, so what the answers were is kept: an image of a size
that was seen before is only compared with its prompt. That holds since nothing small, which the checks look into, may
travel outside the header.

What vLLM's own renderer has made in this process (stages `decoded` and `url`) is checked alike (`check_rendered`): a
request's options have been applied there, too.

The methods of vLLM's processor used here are private; `tests/contract/test_vllm_engine_validation.py` pins them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.feature_extraction_utils import BatchFeature
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from vllm.multimodal.processing.processor import BaseMultiModalProcessor, PromptUpdateDetails

from medialane.core.errors import InvalidFeature, PromptRejected
from medialane.core.feature import MediaPayload, PlaceholderRange
from medialane.core.media import Modality
from medialane.core.request import ExpandedPrompt
from medialane.vllm_bridge.item_shape import UNFIT, learn, num_embeds
from medialane.vllm_bridge.placeholder_layout import PlaceholderLayout, PlaceholderLayouts, decode_options
from medialane.vllm_bridge.seams.multimodal import fields_config, find_placeholders, prompt_updates

#: mm_hash is opaque to us, but it becomes a key in several caches.
MAX_HASH_CHARS = 256

#: The options of a request that has none.
NO_OPTIONS = b"{}"


class FeatureChecker:
    """Checks expanded prompts for one model. Made once, used from the event loop."""

    def __init__(self, processor: BaseMultiModalProcessor) -> None:
        self._processor = processor
        self._limits = dict(processor.info.allowed_mm_limits)
        self._shapes = learn(processor)
        self._merge = merge_size(processor)
        self._layouts = PlaceholderLayouts(processor)

    def check(self, prompt: ExpandedPrompt, items: Sequence[MultiModalKwargsItem]) -> None:
        """Raise InvalidFeature unless `items`, the prompt's decoded features in order, fit themselves and the prompt.

        Raises PromptRejected where there are more of them than the operator allows.
        """
        features = prompt.features
        places = [placeholder_of(f) for f in features]
        check_ranges(len(prompt.token_ids), places)
        check_order([f.modality for f in features], places)
        self._check_counts(features)
        if not all(0 < len(feature.mm_hash) <= MAX_HASH_CHARS for feature in features):
            raise InvalidFeature("a feature has no usable mm_hash")
        self._check_placeholders(prompt, self._layout_of(prompt, items))

    def _check_counts(self, features: Sequence[MediaPayload]) -> None:
        for modality, count in Counter(f.modality for f in features).items():
            limit = self._limits.get(modality, 0)
            if count > limit:
                raise PromptRejected(f"At most {limit} {modality}(s) may be provided in one prompt.")

    def _layout_of(self, prompt: ExpandedPrompt, items: Sequence[MultiModalKwargsItem]) -> PlaceholderLayout:
        def check_items() -> None:
            for feature, item in zip(prompt.features, items, strict=True):
                self._check_item(feature.modality, item, prompt.options)

        def confirm(layout: PlaceholderLayout) -> None:
            if prompt.options == NO_OPTIONS:
                return
            own = self._layouts.find(prompt.features, NO_OPTIONS).updates
            for modality, found in layout.kwargs.items():
                for item, ours, theirs in zip(found, own[modality], layout.updates[modality], strict=True):
                    for update in theirs:
                        self._check_embeds(modality, item, num_embeds(update.content), ours)

        try:
            return self._layouts.find(prompt.features, prompt.options, check=check_items, confirm=confirm)
        except UNFIT as error:
            raise InvalidFeature("the model's processor cannot place these features in a prompt") from error

    def check_rendered(self, rendered: Mapping[str, Any], media: Mapping[str, Any], options: bytes) -> None:
        """Raise InvalidFeature unless what vLLM's renderer made of `media` fits the model and the placeholders.

        Items of modalities that are not in `media` are not looked at.
        """
        found: Mapping[str, Any] = rendered["encoder_prompt"] if rendered["type"] == "enc_dec" else rendered
        token_ids = found.get("encoder_prompt_token_ids", found["prompt_token_ids"])
        kwargs = {modality: found["mm_kwargs"][modality] for modality in media}
        places = {modality: [_own_range(p) for p in found["mm_placeholders"][modality]] for modality in media}
        check_ranges(len(token_ids), [place for of in places.values() for place in of])
        for modality, items in kwargs.items():
            if len(items) != len(places[modality]):
                raise InvalidFeature(f"{modality}: {len(items)} items and {len(places[modality])} placeholders")
            for item in items:
                self._check_item(modality, item, options)
        if options != NO_OPTIONS:
            self._check_rendered_embeds(kwargs, places, media)

    def _check_rendered_embeds(
        self,
        kwargs: Mapping[str, Sequence[MultiModalKwargsItem]],
        places: Mapping[str, Sequence[PlaceholderRange]],
        media: Mapping[str, Any],
    ) -> None:
        try:
            data = self._processor.info.parse_mm_data(media)
            own = prompt_updates(self._processor, data, {}, MultiModalKwargsItems(kwargs))
        except UNFIT as error:
            raise InvalidFeature("the model's processor cannot place these media in a prompt") from error
        for modality, items in kwargs.items():
            for item, place, ours in zip(items, places[modality], own[modality], strict=True):
                self._check_embeds(modality, item, place.num_embeds, ours)

    def _check_item(self, modality: str, item: MultiModalKwargsItem, options: bytes) -> None:
        shape = self._shapes.get(modality)
        if shape is None:
            raise InvalidFeature(f"this worker does not support {modality} features")
        shape.check(modality, item, has_options=options != NO_OPTIONS)
        for name, elem in item.items():
            if name.endswith("grid_thw"):
                _check_grid(f"{modality} {name}", elem.data, self._merge)
        self._check_rows(modality, item, decode_options(options))

    def _check_embeds(self, modality: str, item: MultiModalKwargsItem, count: int, own: Sequence[Any]) -> None:
        """`own` is what the processor would put there without the request's options."""
        takes = self._shapes[modality].accepts(item, count)
        if takes is None:
            takes = count in [num_embeds(update.content) for update in own]
        if not takes:
            raise InvalidFeature(f"{modality}: {count} placeholder tokens are not as many as the model has embeddings")

    def _check_rows(self, modality: str, item: MultiModalKwargsItem, kwargs: Mapping[str, object]) -> None:
        """Every flat field must have the length that the item's other fields say."""
        batch = BatchFeature({name: _as_batch(elem) for name, elem in item.items()})
        try:
            configs = fields_config(self._processor, batch, kwargs)
        except UNFIT as error:
            raise InvalidFeature(f"{modality}: the fields do not describe an item") from error
        for name, elem in item.items():
            field = configs[name].field
            if type(field) is not type(elem.field) or field.keep_on_cpu != elem.field.keep_on_cpu:
                raise InvalidFeature(f"{modality} {name}: the field is of another kind")
            if isinstance(field, MultiModalFlatField):
                _check_flat(f"{modality} {name}", elem, field)

    def _check_placeholders(self, prompt: ExpandedPrompt, layout: PlaceholderLayout) -> None:
        """The prompt must have, at each placeholder, the tokens that the model's own processor would put there."""
        expected = {modality: iter(items) for modality, items in layout.updates.items()}
        fit = [
            any(_fits(prompt.token_ids, placeholder_of(feature), u.content) for u in next(expected[feature.modality]))
            for feature in prompt.features
        ]
        if not all(fit) and not self._found_there(prompt, layout.updates):
            first = prompt.features[fit.index(False)]
            place = placeholder_of(first)
            raise InvalidFeature(
                f"{first.modality}: the prompt's {place.length} tokens at {place.offset} are not those of the feature"
            )

    def _found_there(self, prompt: ExpandedPrompt, updates: Any) -> bool:
        """Ask the family itself, for those that do not place an update's tokens as they are (Gemma-3's newlines)."""
        found = find_placeholders(self._processor, prompt.token_ids, updates)
        ranges = {modality: iter([_own_range(p.to_range()) for p in places]) for modality, places in found.items()}
        return all(next(ranges.get(f.modality, iter(())), None) == f.placeholder for f in prompt.features)


def placeholder_of(feature: MediaPayload) -> PlaceholderRange:
    """Raises InvalidFeature where there is none."""
    if feature.placeholder is None:
        raise InvalidFeature("a feature has no placeholder")
    return feature.placeholder


def check_ranges(num_tokens: int, ranges: Sequence[PlaceholderRange]) -> None:
    """Raise InvalidFeature unless the ranges lie inside the prompt and no token takes an embedding of two of them.

    Ranges come grouped by modality, so not in the order of the prompt. Tokens that take no embedding may be shared:
    Gemma-3's newlines after one image and before the next are one token of both, and where a video is heard (Qwen-Omni)
    its sound's tokens stand among its own.
    """
    if (last := max((found.end for found in ranges), default=0)) > num_tokens:
        raise InvalidFeature(f"a placeholder ends at {last}, the prompt at {num_tokens}")
    taken = np.zeros(num_tokens, bool)
    for found in ranges:
        marks = np.ones(found.length, bool) if found.is_embed is None else np.frombuffer(found.is_embed, bool)
        tokens = taken[found.offset : found.end]
        if not marks.any():
            raise InvalidFeature(f"the placeholder at {found.offset} takes no embedding")
        if (tokens & marks).any():
            raise InvalidFeature(f"the placeholder at {found.offset} takes tokens of another")
        tokens |= marks


def check_order(modalities: Sequence[Modality], ranges: Sequence[PlaceholderRange]) -> None:
    """Raise InvalidFeature unless the items of each modality stand in the order of the prompt."""
    ends: dict[Modality, int] = {}
    for modality, found in zip(modalities, ranges, strict=True):
        if found.offset <= ends.get(modality, -1):
            raise InvalidFeature(f"{modality}: the placeholder at {found.offset} comes after a later one")
        ends[modality] = found.offset


def _check_grid(name: str, grid: torch.Tensor, merge: int) -> None:
    """(frames, rows, columns) of patches, which the Qwen family merges in squares: its encoder fails on others."""
    frames, rows, columns = grid.view(-1).tolist() if grid.numel() == _GRID_NUMBERS else (0, 0, 0)
    if frames < 1 or rows < 1 or columns < 1 or rows % merge or columns % merge:
        raise InvalidFeature(f"{name}: {grid.tolist()} is not a grid of {merge}x{merge} squares")


def merge_size(processor: BaseMultiModalProcessor) -> int:
    """Only the family knows where its configuration keeps it, and whether it has one."""
    vision = getattr(processor.info.get_hf_config(), "vision_config", None)
    return int(getattr(vision, "spatial_merge_size", 1))


_GRID_NUMBERS = 3


def _as_batch(elem: MultiModalFieldElem) -> Any:
    """What the Hugging Face processor gives for a request with this one item."""
    if isinstance(elem.field, MultiModalBatchedField):
        return elem.data.unsqueeze(0) if isinstance(elem.data, torch.Tensor) else [elem.data]
    return elem.data


def _check_flat(name: str, elem: MultiModalFieldElem, field: MultiModalFlatField) -> None:
    size = elem.data.shape[field.dim] if isinstance(elem.data, torch.Tensor) else len(elem.data)
    if len(field.slices) != 1:
        raise InvalidFeature(f"{name}: rows of {len(field.slices)} items in one")
    (only,) = field.slices
    cut = only[field.dim] if isinstance(only, tuple | list) else only
    if (cut.start or 0, size if cut.stop is None else int(cut.stop), cut.step or 1) != (0, size, 1):
        raise InvalidFeature(f"{name}: {size} rows where the other fields say {int(cut.stop)}")


def _fits(token_ids: list[int], place: PlaceholderRange, content: PromptUpdateDetails) -> bool:
    if len(content.full) != place.length or token_ids[place.offset : place.end] != content.full:
        return False
    wanted = None if content.is_embed is None else _marks(content.is_embed(content.full))
    return wanted == place.is_embed


def _own_range(place: Any) -> PlaceholderRange:
    """vLLM's range as ours."""
    marks = None if place.is_embed is None else _marks(place.is_embed)
    return PlaceholderRange(offset=place.offset, length=place.length, is_embed=marks)


def _marks(is_embed: torch.Tensor) -> bytes:
    return bytes(is_embed.to(torch.uint8).numpy())
