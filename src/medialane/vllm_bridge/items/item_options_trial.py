"""Finds out by a trial whether the items of a request may have processor options of their own.

Theory of operation. vLLM applies a request's options to all of its items; medialane also has pixel limits of single
items, applied when an item is processed. The prompt is then expanded without them: that is right only if the family
derives an item's tokens from its feature (a grid), not from its size and the options.
"""

from __future__ import annotations

import logging
import warnings

from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.core.feature import MediaPayload
from medialane.core.hashing import canonical_options
from medialane.core.media import Decoded, Modality
from medialane.prepare.processor import ProcessedItem
from medialane.vllm_bridge.items.header_values import NO_OPTIONS
from medialane.vllm_bridge.items.pixel_limits import max_pixels_of
from medialane.vllm_bridge.items.placeholder_layout import PlaceholderLayouts
from medialane.vllm_bridge.items.preparation import REFUSED, VllmProcessor, trial_image, trial_video

logger = logging.getLogger(__name__)

_SAMPLES: dict[Modality, Decoded] = {"image": trial_image(768, 768), "video": trial_video(768, 768)}

#: A quarter of an image's pixels, or of a frame's; some families count those of all frames.
_LOWER = canonical_options({"min_pixels": 4096, "max_pixels": 768 * 768 // 4})


def tokens_follow_features(processor: BaseMultiModalProcessor) -> bool:
    """Return whether an item's tokens are the same with and without the options with which it was processed, for all
    modalities that have pixel limits and accept these options. False if there is none. Processes some items: call it
    once."""
    found = []
    for modality in max_pixels_of(processor):
        try:
            found.append(_follow(processor, modality))
        except REFUSED as error:
            logger.info("pixel limits of single %ss are not accepted: %r", modality, error.__cause__ or error)
        else:
            if not found[-1]:
                logger.info("pixel limits of single %ss are not accepted: their tokens do not follow them", modality)
    return bool(found) and all(found)


def _follow(processor: BaseMultiModalProcessor, modality: Modality) -> bool:
    heavy, layouts = VllmProcessor(processor), PlaceholderLayouts(processor)

    def tokens(item: ProcessedItem, options: bytes) -> list[list[int]]:
        payload = MediaPayload(modality, "", item.header, (), item.size)
        (updates,) = layouts.find([payload], options).updates[modality]
        return [list(update.content.full) for update in updates]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers', about these options
        default, lower = (heavy.process(_SAMPLES[modality], options) for options in (NO_OPTIONS, _LOWER))
        expected = tokens(lower, _LOWER)
    return tokens(lower, NO_OPTIONS) == expected != tokens(default, NO_OPTIONS)
