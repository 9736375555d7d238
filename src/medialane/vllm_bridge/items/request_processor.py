"""The processor of requests: one that refuses options with which the model could not encode an item.

Theory of operation. In some families the number of embeddings does not follow from an item's tensors
(`ItemShape.measure`): a prompt is expanded by an image's size, and the model's code expects the tiles that
belong to that size. A processor option may change the tiles and not the number (LLaVA-OneVision's `crop_size`): the
encoder then raises inside EngineCore, which ends every request. So an item of such a family is processed with and
without the options, and must have the same layout. This is done here, not in validation, because it takes a second run
of the processor: a preparer's memory and time are limited.
"""

from __future__ import annotations

from medialane.core.media import Decoded
from medialane.prepare.processor import ProcessedItem
from medialane.vllm_bridge.items.features import decode_item_without_tensors
from medialane.vllm_bridge.items.header_values import NO_OPTIONS
from medialane.vllm_bridge.items.item_shape import check_layout, counts_by_size
from medialane.vllm_bridge.items.preparation import VllmProcessor


class RequestProcessor(VllmProcessor):
    """Makes features for requests."""

    def process(self, media: Decoded, options: bytes) -> ProcessedItem:
        made = super().process(media, options)
        modality = media.modality
        if options != NO_OPTIONS and counts_by_size(self._processor, modality):
            default = super().process(media, NO_OPTIONS)
            check_layout(modality, *(decode_item_without_tensors(item.header) for item in (made, default)))
        return made
