"""Caches the placeholder layout that the model's processor returns for items of equal header, size and options.

Theory of operation. vLLM's processors return *prompt updates*: the placeholder tokens of each item. These depend on the
items' small fields (a grid), their sizes and the request's options, but not on pixels or the prompt, so two photographs
of 1024x768 have the same. Computing them takes half a millisecond, so recent results are cached. The key is the
complete input, in order, so that families whose items depend on each other are handled correctly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from cachetools import LRUCache
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.types.media import MediaSize, Modality
from medialane.vllm_bridge.items.features import decode_item_without_tensors
from medialane.vllm_bridge.seams.multimodal import prompt_updates
from medialane.vllm_bridge.seams.stand_ins import has_stand_in, stand_ins_like

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
    updates of which one applies. Cached and shared: read-only."""

    data: MultiModalDataItems
    kwargs: MultiModalKwargsItems
    updates: Mapping[str, Sequence[Sequence[Any]]]
    nbytes: int


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


def layout_of(
    processor: BaseMultiModalProcessor,
    media: Sequence[PlaceholderSource],
    items: Sequence[MultiModalKwargsItem],
    options: bytes,
) -> PlaceholderLayout:
    """Return the layout of `items`, those of `media` in order. Raises whatever the processor raises."""
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
    frames = np.broadcast_to(np.zeros((1, 1, 1, 3), np.uint8), (size.num_frames, size.height, size.width, 3))
    return frames, msgspec.json.decode(size.metadata) if size.metadata else None


def decode_options(options: bytes) -> dict[str, object]:
    """Return processor keyword arguments from canonical JSON."""
    return msgspec.json.decode(options, type=dict[str, object])
