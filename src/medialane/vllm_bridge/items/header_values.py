"""Puts all values into an item's header that prompt assembly and validation read.

Theory of operation. Which fields a family's code reads is not declared anywhere, so it is observed: for each item, the
code that gateway and worker run over its header is run in the preparer. Large tensors are stand-ins there, whose
values cannot be read, so it either succeeds as it will there, or raises; then the item's large fields are added to the
header, smallest first, until it succeeds, and fields that turn out not to be needed are removed. In most families no
large field is read; some of audio count the tokens of a clip by its mask. Items of equal header, size and options have
equal outcomes, and are not tried again.

Caches the placeholder layout that the model's processor returns for items of equal header, size and options.

Theory of operation. vLLM's processors return *prompt updates*: the placeholder tokens of each item. These depend on the
items' small fields (a grid), their sizes and the request's options, but not on pixels or the prompt, so two photographs
of 1024x768 have the same. Computing them takes half a millisecond, so recent results are cached. The key is the
complete input, in order, so that families whose items depend on each other are handled correctly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, assert_never

import msgspec
import numpy as np
import torch
from cachetools import LRUCache
from huggingface_hub.errors import StrictDataclassError
from transformers.feature_extraction_utils import BatchFeature
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.prepare.processor import ProcessedItem
from medialane.types.errors import FeatureUnsupported
from medialane.types.feature import MAX_HEADER_BYTES, MediaPayload, PlaceholderRange
from medialane.types.media import MediaSize, Modality
from medialane.vllm_bridge.items.features import INLINE_BYTES, decode_item_without_tensors, encode_item
from medialane.vllm_bridge.items.prepared_input import embed_mask, from_vllm_range
from medialane.vllm_bridge.seams.multimodal import fields_config, find_placeholders, prompt_updates
from medialane.vllm_bridge.seams.stand_ins import has_stand_in, stand_ins_like

#: The options of a request that has none.
NO_OPTIONS = b"{}"

#: Raised by a family's code for inconsistent fields, for values that are unknown, or for options that it rejects.
MALFORMED_FEATURE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    AssertionError,
    ArithmeticError,
    UnboundLocalError,  # MiniCPM-V 4.6 without `do_resize`
    StrictDataclassError,  # an option of the wrong type, where vLLM calls an image processor itself
)


class HeaderWriter:
    """Encodes the items of one processor. Not thread-safe."""

    def __init__(self, processor: BaseMultiModalProcessor) -> None:
        self._processor = processor
        self._layouts = PlaceholderLayouts(processor)

    def encode(self, modality: Modality, item: MultiModalKwargsItem, size: MediaSize, options: bytes) -> ProcessedItem:
        """Return the item in the form in which it is sent.

        Raises FeatureUnsupported if a value that has to be in the header cannot be there.
        """
        header, specs, buffers = encode_item(item)
        if not specs or not self._failures(modality, header, size, options):
            return ProcessedItem(header=header, specs=specs, buffers=buffers, size=size)
        return self._with_values(modality, item, size, options)

    def _with_values(
        self, modality: Modality, item: MultiModalKwargsItem, size: MediaSize, options: bytes
    ) -> ProcessedItem:
        # An item that fails with all its values (a clip that is too short) is to fail with the same error later.
        expected = self._failures_of_whole(modality, item, size, options)

        def suffices(inline: Sequence[str]) -> bool:
            header = encode_item(item, inline)[0]
            fits = len(header) <= MAX_HEADER_BYTES
            return fits and self._failures(modality, header, size, options) == expected

        sizes = {name: _num_bytes(elem.data) for name, elem in item.items()}
        large = sorted((name for name in item if sizes[name] > INLINE_BYTES), key=sizes.__getitem__)
        inline = next((large[:count] for count in range(len(large) + 1) if suffices(large[:count])), None)
        if inline is None:
            raise FeatureUnsupported(f"the prompt depends on values of this {modality} that are too large for a header")
        for name in inline[:-1]:  # the last is needed
            without = [other for other in inline if other != name]
            inline = without if suffices(without) else inline
        header, specs, buffers = encode_item(item, inline)
        return ProcessedItem(header=header, specs=specs, buffers=buffers, size=size)

    def _failures(self, modality: Modality, header: bytes, size: MediaSize, options: bytes) -> list[str]:
        """Return the errors of assembly and validation with this header."""
        payload = MediaPayload(modality, "", header, (), size)

        def run(given: bytes) -> None:
            self._layouts.find([payload], given, check=lambda: self._split(decode_item_without_tensors(header), given))

        return _errors_of(run, options)

    def _failures_of_whole(
        self, modality: Modality, item: MultiModalKwargsItem, size: MediaSize, options: bytes
    ) -> list[str]:
        payload = MediaPayload(modality, "", b"", (), size)

        def run(given: bytes) -> None:
            self._split(item, given)
            layout_of(self._processor, [payload], [item], given)

        return _errors_of(run, options)

    def _split(self, item: MultiModalKwargsItem, options: bytes) -> None:
        configs_of(self._processor, item, decode_options(options))


def _errors_of(run: Callable[[bytes], None], options: bytes) -> list[str]:
    """Run with the request's options and, as validation does, without."""
    errors = []
    for given in dict.fromkeys((options, NO_OPTIONS)):
        try:
            run(given)
        except MALFORMED_FEATURE as error:
            errors.append(repr(error))
    return errors


def configs_of(
    processor: BaseMultiModalProcessor, item: MultiModalKwargsItem, kwargs: Mapping[str, object]
) -> Mapping[str, Any]:
    """Return how the processor splits the fields of a batch that has only this item."""
    batch = BatchFeature({name: _as_batch(elem) for name, elem in item.items()})
    return fields_config(processor, batch, kwargs)


def _as_batch(elem: MultiModalFieldElem) -> Any:
    """Return the field as the Hugging Face processor returns it for a request with this single item."""
    if isinstance(elem.field, MultiModalBatchedField):
        return elem.data.unsqueeze(0) if isinstance(elem.data, torch.Tensor) else [elem.data]
    return elem.data


def _num_bytes(data: Any) -> int:
    if isinstance(data, torch.Tensor):
        return int(data.nbytes)
    return sum(map(_num_bytes, data)) if isinstance(data, list | tuple) else 0


#: Limit of cached keys and token lists. A 1024x768 image of Qwen2.5-VL takes 9 kB.
MAX_BYTES = 16 << 20

_TOKEN_BYTES = 8


class PlaceholderSource(Protocol):
    """What determines an item's placeholder: a `Feature` or a `MediaPayload`."""

    @property
    def modality(self) -> Modality: ...
    @property
    def header(self) -> bytes: ...
    @property
    def size(self) -> MediaSize: ...


class PlaceholderLayout(NamedTuple):
    """The items of a prompt without their large tensors, and vLLM's prompt updates: by modality, then by item, the
    updates; one of them applies. Cached and shared: read-only."""

    data: MultiModalDataItems
    kwargs: MultiModalKwargsItems
    updates: Mapping[str, Sequence[Sequence[Any]]]
    nbytes: int

    def copied_updates(self) -> dict[str, list[list[Any]]]:
        """Return new lists, which a family may modify (Qwen-Omni does for the audio of a video); updates are frozen."""
        return {modality: [list(updates) for updates in items] for modality, items in self.updates.items()}


class PlaceholderLayouts:
    """The layouts of one processor. Not thread-safe."""

    def __init__(self, processor: BaseMultiModalProcessor, *, max_bytes: int = MAX_BYTES) -> None:
        self._processor = processor
        self._cache: LRUCache[object, PlaceholderLayout] = LRUCache(max_bytes, getsizeof=lambda layout: layout.nbytes)

    def find(
        self,
        media: Sequence[PlaceholderSource],
        options: bytes,
        *,
        check: Callable[[], None] | None = None,
        confirm: Callable[[PlaceholderLayout], None] | None = None,
    ) -> PlaceholderLayout:
        """Return the layout of these items. If this combination of items and options is not cached, `check` is called
        before the processor and `confirm` with its result; their exceptions propagate, and the layout is not cached.
        Raises whatever the processor raises."""
        key = (options, tuple([(item.modality, item.header, item.size) for item in media]))
        layout = self._cache.get(key)
        if layout is None:
            if check is not None:
                check()
            items = _equally_known([decode_item_without_tensors(item.header) for item in media])
            layout = layout_of(self._processor, media, items, options)
            if confirm is not None:
                confirm(layout)
            if layout.nbytes <= self._cache.maxsize:
                self._cache[key] = layout
        return layout

    def placements(
        self,
        token_ids: list[int],
        media: Sequence[PlaceholderSource],
        ranges: Sequence[PlaceholderRange],
        layout: PlaceholderLayout,
    ) -> list[PlaceholderRange | None]:
        """Return the ranges of these items with the masks of the model's own placeholders; None for each where the
        prompt has other tokens. The family's own search is used for families that modify an update's tokens in the
        prompt (Gemma-3's newlines)."""
        updates = {modality: iter(items) for modality, items in layout.updates.items()}
        placed = [_at(token_ids, place, next(updates[one.modality])) for one, place in zip(media, ranges, strict=True)]
        if all(placed):
            return placed
        located = find_placeholders(self._processor, token_ids, layout.copied_updates())
        found = {m: iter([from_vllm_range(place.to_range()) for place in places]) for m, places in located.items()}
        searched = [next(found.get(one.modality, iter(())), None) for one in media]
        return [
            one or (other if other is not None and _is_at(other, given) else None)
            for one, other, given in zip(placed, searched, ranges, strict=True)
        ]


def layout_of(
    processor: BaseMultiModalProcessor,
    media: Sequence[PlaceholderSource],
    items: Sequence[MultiModalKwargsItem],
    options: bytes,
) -> PlaceholderLayout:
    """Return the layout of `items`, made of `media` in order. Raises whatever the processor raises."""
    sizes: dict[str, list[Any]] = {}
    processed: dict[str, list[Any]] = {}
    for one, item in zip(media, items, strict=True):
        sizes.setdefault(one.modality, []).append(stand_in(one.modality, one.size))
        processed.setdefault(one.modality, []).append(item)
    data = processor.info.parse_mm_data(sizes)
    kwargs = MultiModalKwargsItems(processed)
    updates = prompt_updates(processor, data, decode_options(options), kwargs)
    num_tokens = sum(len(u.content.full) for items in updates.values() for item in items for u in item)
    nbytes = num_tokens * _TOKEN_BYTES + sum(len(one.header) + len(one.size.metadata) for one in media)
    return PlaceholderLayout(data, kwargs, updates, nbytes)


def _is_at(place: PlaceholderRange, given: PlaceholderRange) -> bool:
    return (place.offset, place.length) == (given.offset, given.length)


def _at(token_ids: list[int], given: PlaceholderRange, updates: Sequence[Any]) -> PlaceholderRange | None:
    """Return the range with the mask of the update whose tokens are there; None if there is none."""
    there = token_ids[given.offset : given.end]
    content = next((update.content for update in updates if update.content.full == there), None)
    return None if content is None else PlaceholderRange(given.offset, given.length, embed_mask(content))


def _equally_known(items: Sequence[MultiModalKwargsItem]) -> list[MultiModalKwargsItem]:
    """Replace fields by stand-ins that are stand-ins in another item: vLLM batches a field of all items into one
    tensor, which has values or not. An item whose values are needed has them in its header."""
    unknown = {name for item in items for name, elem in item.items() if has_stand_in(elem.data)}

    def known(name: str, elem: MultiModalFieldElem) -> MultiModalFieldElem:
        return MultiModalFieldElem(stand_ins_like(elem.data), elem.field) if name in unknown else elem

    return [MultiModalKwargsItem({name: known(name, elem) for name, elem in item.items()}) for item in items]


def stand_in(modality: Modality, size: MediaSize) -> Any:
    """Return an item of the true size without content: all strides are zero."""
    if modality == "audio":
        return np.broadcast_to(np.zeros(1, np.float32), (size.num_samples,))
    if modality == "image":
        return np.broadcast_to(np.zeros((1, 1, 3), np.uint8), (size.height, size.width, 3))
    if modality == "video":
        frames = np.broadcast_to(np.zeros((1, 1, 1, 3), np.uint8), (size.num_frames, size.height, size.width, 3))
        return frames, msgspec.json.decode(size.metadata) if size.metadata else None
    assert_never(modality)


def decode_options(options: bytes) -> dict[str, object]:
    """Return processor keyword arguments from canonical JSON."""
    return msgspec.json.decode(options, type=dict[str, object])
