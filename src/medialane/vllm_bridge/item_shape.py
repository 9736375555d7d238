"""What items of a model look like, learned from samples that its own processor has processed without options.

Theory of operation. What differs between the samples may differ between requests; what is the same in all of them
(side of a patch, side of a tile, mel bins) is fixed by the model's weights. A request's own processor options can
change either, and vLLM does not compare the result with the model: its encoder then raises inside EngineCore, or gives
another number of embeddings than the prompt has placeholders, and either one ends every request. So an item of a
request with options must have the sizes that all samples share, and its number of embeddings must be the model's own.
That number is derived in one of two ways, whichever the samples show to hold:

* in most families each embedding stands for a fixed number of elements of the largest field (patches, tiles);
* in the others (padding, cropping, resampling by masks) the processor says the number for the item's fields and size;
  it must say the same without the options.
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

#: The last ones are large: pictures of many tiles, sound longer than the window of Whisper's encoder.
SAMPLES: dict[Modality, tuple[Decoded, ...]] = {
    "image": (trial_image(64, 64), trial_image(448, 224), trial_image(280, 700), trial_image(1600, 1200)),
    "video": (trial_video(), trial_video(224, 112, 2), trial_video(112, 168, 7)),
    "audio": (trial_audio(), trial_audio(0.4), trial_audio(2.3), trial_audio(31.0)),
}

#: What a family's processor raises over fields that do not belong together.
UNFIT = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError, ArithmeticError)

#: Whole numbers of up to so many bytes (grids, sizes, counts) are looked at; pixels are not.
_SMALL_BYTES = 4096


class FieldSpec(msgspec.Struct, frozen=True):
    """What is the same in a field of every item. `dims` has None where the size varies, or may in an item that no
    sample is like (tiles, rows); in `own_dims` those are None that did vary, or count rows."""

    dtype: torch.dtype | None
    dims: tuple[int | None, ...]
    own_dims: tuple[int | None, ...]
    may_be_negative: bool


class ItemShape(msgspec.Struct, frozen=True):
    """The items of one modality. `elements_per_embed` is of the field `largest`, None where it is not the same in all
    samples."""

    fields: dict[str, FieldSpec]
    largest: str
    elements_per_embed: Fraction | None

    def check(self, modality: str, item: MultiModalKwargsItem, *, has_options: bool) -> None:
        """Raise InvalidFeature unless the item's fields are those of the samples."""
        if item.keys() != self.fields.keys():
            raise InvalidFeature(f"{modality}: fields {sorted(item)} instead of {sorted(self.fields)}")
        for name, elem in item.items():
            spec = self.fields[name]
            _check_field(f"{modality} {name}", elem, spec, spec.own_dims if has_options else spec.dims)

    def accepts(self, item: MultiModalKwargsItem, num_embeds: int) -> bool | None:
        """Whether the model makes so many embeddings of the item; None where only its processor can say."""
        if self.elements_per_embed is None:
            return None
        return bool(self.elements_per_embed * num_embeds == item[self.largest].data.numel())


def learn(processor: BaseMultiModalProcessor) -> dict[str, ItemShape]:
    """What the items of this model look like, by modality."""
    heavy, layouts = VllmProcessor(processor), PlaceholderLayouts(processor)
    return {
        modality: _learn(heavy, layouts, modality, samples)
        for modality, samples in SAMPLES.items()
        if modality in processor.info.supported_mm_limits
    }


def num_embeds(content: PromptUpdateDetails) -> int:
    """How many tokens of a placeholder take an embedding."""
    return len(content.full) if content.is_embed is None else int(content.is_embed(content.full).sum())


def _learn(
    heavy: VllmProcessor, layouts: PlaceholderLayouts, modality: Modality, samples: Sequence[Decoded]
) -> ItemShape:
    made: list[ProcessedItem] = []
    for sample in samples:
        with suppress(InvalidRequest):  # longer or larger than this model takes
            made.append(heavy.process(sample, b"{}"))
    items = [decode_item(found.header, found.buffers) for found in made]
    names = list(items[0])
    fields = {name: _common([item[name] for item in items]) for name in names}
    largest = max(names, key=lambda name: _num_bytes(items[0][name]))
    handed = [MediaPayload(modality, "sample", found.header, (), found.size) for found in made]
    try:
        counts = [_num_embeds_of(layouts, item) for item in handed]
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
    if isinstance(field, MultiModalFlatField) and own:  # rows are counted by the other fields
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


def _check_field(name: str, elem: MultiModalFieldElem, wanted: FieldSpec, dims: tuple[int | None, ...]) -> None:
    if wanted.dtype is None:
        return
    data: Any = elem.data
    if not isinstance(data, torch.Tensor) or data.dtype != wanted.dtype:
        raise InvalidFeature(f"{name}: {getattr(data, 'dtype', type(data).__name__)} instead of {wanted.dtype}")
    if data.ndim != len(dims):
        raise InvalidFeature(f"{name}: {data.ndim} dimensions instead of {len(dims)}")
    if any(size is not None and size != found for size, found in zip(dims, data.shape, strict=True)):
        raise InvalidFeature(f"{name}: shape {tuple(data.shape)} instead of {dims}")
    if not wanted.may_be_negative and data.nbytes <= _SMALL_BYTES and bool((data < 0).any()):
        raise InvalidFeature(f"{name}: a negative number")
