"""The items that a model is tried with at start: samples of each modality, which its own processor has processed.

Theory of operation. What is known of a family is learned from such items, not from a list of names: the shapes of its
fields (`item_shape`), how many patches make one embedding (`merge_size`), whether its items can be processed one by one
(`stage_fitness`). Processing takes most of the time of these trials, so each process does it once, without options,
and keeps what is needed of an item: its header, not its large tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.core.media import Decoded, MediaSize, Modality
from medialane.vllm_bridge.items.header_values import NO_OPTIONS
from medialane.vllm_bridge.items.placeholder_layout import PlaceholderLayouts
from medialane.vllm_bridge.items.preparation import REFUSED, VllmProcessor, trial_audio, trial_image, trial_video
from medialane.vllm_bridge.seams.multimodal import accepted_modalities

logger = logging.getLogger(__name__)

#: The last ones are large: images of many tiles, audio longer than the window of Whisper's encoder.
SAMPLES: dict[Modality, tuple[Decoded, ...]] = {
    "image": (trial_image(64, 64), trial_image(448, 224), trial_image(280, 700), trial_image(1600, 1200)),
    "video": (trial_video(), trial_video(224, 112, 2), trial_video(112, 168, 7)),
    "audio": (trial_audio(), trial_audio(0.4), trial_audio(2.3), trial_audio(31.0)),
}


class TrialItem(NamedTuple):
    """A sample that the model's processor accepts, and the header of its item."""

    modality: Modality
    media: Decoded
    header: bytes
    size: MediaSize


class TrialItems:
    """The items of one processor."""

    def __init__(self, processor: BaseMultiModalProcessor) -> None:
        self.layouts = PlaceholderLayouts(processor)
        #: Empty for a modality of which no sample can be processed; then `refusals` has the last error.
        self.by_modality: dict[Modality, Sequence[TrialItem]] = {}
        self.refusals: dict[Modality, Exception] = {}
        heavy = VllmProcessor(processor)
        for modality in SAMPLES:
            if modality in accepted_modalities(processor):
                self.by_modality[modality] = self._processed(heavy, modality)

    def _processed(self, heavy: VllmProcessor, modality: Modality) -> Sequence[TrialItem]:
        """Process those samples that the model's processor accepts: others are longer or larger than it supports, or of
        a size that it cannot handle."""
        found = []
        for sample in SAMPLES[modality]:
            try:
                made = heavy.process(sample, NO_OPTIONS)
            except Exception as error:  # a family's own code may fail in any way
                if not isinstance(error, REFUSED):
                    logger.info("the model's processor fails with a sample of %s", modality, exc_info=True)
                self.refusals[modality] = error
            else:
                found.append(TrialItem(modality, sample, made.header, made.size))
        return found


@lru_cache(maxsize=2)  # a process has one processor
def trial_items(processor: BaseMultiModalProcessor) -> TrialItems:
    """Return the items. Processes them at the first call: takes a fraction of a second."""
    return TrialItems(processor)
