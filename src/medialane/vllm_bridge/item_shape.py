"""The shapes of a model's items, learned from samples that its own processor has processed without options.

Theory of operation. Dimensions that differ between the samples may differ between requests; those that are equal in all
of them (patch size, tile size, mel bins) are fixed by the model's weights. A request's own processor options can change
either, and vLLM does not check the result against the model: its encoder then raises inside EngineCore, or returns
another number of embeddings than the prompt has placeholder tokens; either crashes every request. So an item of a
request with options must have the dimensions common to all samples, and the number of embeddings that the model itself
produces. That number is derived in one of two ways, whichever the samples confirm:

* in most families each embedding represents a fixed number of elements of the largest field (patches, tiles);
* in the others (padding, cropping, resampling by masks) the processor computes the number from the item's fields and
  size; it must be the same without the options.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any

import msgspec
import torch
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalFlatField, MultiModalKwargsItem
from vllm.multimodal.processing.processor import BaseMultiModalProcessor, PromptUpdateDetails

from medialane.core.errors import InvalidFeature, InvalidRequest
from medialane.core.feature import MediaPayload
from medialane.core.media import Decoded, Modality
from medialane.prepare.processor import ProcessedItem
from medialane.vllm_bridge.features import decode_item
from medialane.vllm_bridge.placeholder_layout import PlaceholderLayouts
from medialane.vllm_bridge.preparation import VllmProcessor, trial_audio, trial_image, trial_video

#: The last ones are large: images of many tiles, audio longer than the window of Whisper's encoder.
SAMPLES: dict[Modality, tuple[Decoded, ...]] = {
    "image": (trial_image(64, 64), trial_image(448, 224), trial_image(280, 700), trial_image(1600, 1200)),
    "video": (trial_video(), trial_video(224, 112, 2), trial_video(112, 168, 7)),
    "audio": (trial_audio(), trial_audio(0.4), trial_audio(2.3), trial_audio(31.0)),
}

#: Raised by a family's processor for inconsistent fields.
UNFIT = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError, ArithmeticError)

#: Integer tensors up to this size (grids, sizes, counts) are checked for negative values; pixels are not.
_SMALL_BYTES = 4096


class FieldSpec(msgspec.Struct, frozen=True):
    """The properties that a field has in every item. In `dims`, a dimension is None if it varies, or may do so in items
    unlike the samples (tiles, rows); in `own_dims`, if it varied between the samples, or counts rows."""

    dtype: torch.dtype | None
    dims: tuple[int | None, ...]
    own_dims: tuple[int | None, ...]
    may_be_negative: bool


class ItemShape(msgspec.Struct, frozen=True):
    """The items of one modality. `elements_per_embed` refers to the field `largest`; None if it differs between the
    samples."""

    fields: dict[str, FieldSpec]
    largest: str
    elements_per_embed: Fraction | None

    def check(self, modality: str, item: MultiModalKwargsItem, *, has_options: bool) -> None:
        """Raise InvalidFeature unless the item's fields match those of the samples."""
        if item.keys() != self.fields.keys():
            raise InvalidFeature(f"{modality}: fields {sorted(item)} instead of {sorted(self.fields)}")
        for name, elem in item.items():
            spec = self.fields[name]
            _check_field(f"{modality} {name}", elem, spec, spec.own_dims if has_options else spec.dims)

    def accepts(self, item: MultiModalKwargsItem, num_embeds: int) -> bool | None:
        """Return whether the model makes this number of embeddings of the item; None if only its processor knows."""
        if self.elements_per_embed is None:
            return None
        return bool(self.elements_per_embed * num_embeds == item[self.largest].data.numel())


def learn(processor: BaseMultiModalProcessor) -> dict[str, ItemShape]:
    """Return the shape of this model's items, by modality that requests may contain."""
    heavy, layouts = VllmProcessor(processor), PlaceholderLayouts(processor)
    return {
        modality: _learn(heavy, layouts, modality, samples)
        for modality, samples in SAMPLES.items()
        if processor.info.allowed_mm_limits.get(modality)
    }


def num_embeds(content: PromptUpdateDetails) -> int:
    """Return how many tokens of a placeholder are replaced by an embedding."""
    return len(content.full) if content.is_embed is None else int(content.is_embed(content.full).sum())


def _learn(
    heavy: VllmProcessor, layouts: PlaceholderLayouts, modality: Modality, samples: Sequence[Decoded]
) -> ItemShape:
    made: list[ProcessedItem] = []
    for sample in samples:
        with suppress(InvalidRequest):  # longer or larger than this model supports
            made.append(heavy.process(sample, b"{}"))
    items = [decode_item(found.header, found.buffers) for found in made]
    names = list(items[0])
    fields = {name: _common([item[name] for item in items]) for name in names}
    largest = max(names, key=lambda name: _num_bytes(items[0][name]))
    payloads = [MediaPayload(modality, "sample", found.header, (), found.size) for found in made]
    try:
        counts = [_num_embeds_of(layouts, item) for item in payloads]
        found = {Fraction(item[largest].data.numel(), count) for item, count in zip(items, counts, strict=True)}
    except UNFIT:
        found = set()
    return ItemShape(fields, largest, found.pop() if len(found) == 1 else None)


def _num_embeds_of(layouts: PlaceholderLayouts, item: MediaPayload) -> int:
    return num_embeds(layouts.find([item], b"{}").updates[item.modality][0][0].content)


def _num_bytes(elem: MultiModalFieldElem) -> int:
    return elem.data.nbytes if isinstance(elem.data, torch.Tensor) else 0


def _common(elems: Sequence[MultiModalFieldElem]) -> FieldSpec:
    values = [elem.data for elem in elems]
    if not all(isinstance(v, torch.Tensor) for v in values):
        return FieldSpec(None, (), (), True)
    own = _common_dims(values)
    field = elems[0].field
    if isinstance(field, MultiModalFlatField) and own:  # the other fields determine the number of rows
        row = field.dim % len(own)
        dims = own = (*own[:row], None, *own[row + 1 :])
    else:
        dims = (None,) * len(own)
    is_whole = not values[0].is_floating_point()
    return FieldSpec(values[0].dtype, dims, own, not is_whole or any(bool((v < 0).any()) for v in values))


def _common_dims(values: Sequence[torch.Tensor]) -> tuple[int | None, ...]:
    if len({v.ndim for v in values}) != 1:
        return ()
    return tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*(v.shape for v in values), strict=True))


def _check_field(name: str, elem: MultiModalFieldElem, spec: FieldSpec, dims: tuple[int | None, ...]) -> None:
    if spec.dtype is None:
        return
    data: Any = elem.data
    if not isinstance(data, torch.Tensor) or data.dtype != spec.dtype:
        raise InvalidFeature(f"{name}: {getattr(data, 'dtype', type(data).__name__)} instead of {spec.dtype}")
    if data.ndim != len(dims):
        raise InvalidFeature(f"{name}: {data.ndim} dimensions instead of {len(dims)}")
    if any(size is not None and size != found for size, found in zip(dims, data.shape, strict=True)):
        raise InvalidFeature(f"{name}: shape {tuple(data.shape)} instead of {dims}")
    if not spec.may_be_negative and data.nbytes <= _SMALL_BYTES and bool((data < 0).any()):
        raise InvalidFeature(f"{name}: a negative number")
