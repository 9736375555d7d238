"""What is learned at start of a model's processor, in one place: `ProcessorProfile`.

vLLM's processors declare little of what the gateway and validation need to know, so it is found out by processing some
samples (`trial_items`), each once per process. Whoever needs a part gets the object; a part is computed when it is
first read, because store, gateway and worker need different ones and are to start quickly. `medialane doctor MODEL`
prints the whole.

In which form a model accepts embeddings of clients is not part of it: that takes the weights, so each engine process
tries it (`embeds`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.types.media import Modality
from medialane.types.stage import StageName
from medialane.vllm_bridge.items.assembler import VllmAssembler
from medialane.vllm_bridge.items.item_shape import ItemShape, learn_merge_size, learn_shapes
from medialane.vllm_bridge.items.preparation import VllmProcessor
from medialane.vllm_bridge.items.sized_headers import (
    ImageTokens,
    learn_accepts_item_options,
    learn_content_fields,
    learn_max_pixels,
)
from medialane.vllm_bridge.items.stage_fitness import fallback_stage, learn_unfit
from medialane.vllm_bridge.items.trial_items import SAMPLES, TrialItems
from medialane.vllm_bridge.items.validation import FeatureChecker
from medialane.vllm_bridge.seams.device_normalisation import device_normalisation
from medialane.vllm_bridge.seams.multimodal import accepted_modalities, hf_processor_of

#: Attributes of Hugging Face's image processors; those of videos have the same.
_NUMBERS = ("image_mean", "image_std", "rescale_factor")


def normalization_of(processor: BaseMultiModalProcessor, modality: Modality) -> Mapping[str, object]:
    """Return `normalized` of an image's or a video's pixels, and with what the processor or, if they are not, the
    engine normalises them: (pixels * rescale_factor - image_mean) / image_std. Empty for other modalities. Reads files:
    not for the event loop."""
    if modality == "audio":
        return {}
    if (by_engine := device_normalisation(processor.info.ctx.model_config)) is not None:
        return {
            "normalized": False,
            "image_mean": list(by_engine.mean),
            "image_std": list(by_engine.std),
            "rescale_factor": by_engine.rescale_factor,
        }
    hf_processor = hf_processor_of(processor)
    part = getattr(hf_processor, f"{modality}_processor", None) or getattr(hf_processor, "image_processor", None)
    numbers = {name: _plain(getattr(part, name, None)) for name in _NUMBERS}
    return {
        "normalized": bool(getattr(part, "do_normalize", False)),
        **{name: value for name, value in numbers.items() if value is not None},
    }


def _plain(value: Any) -> float | list[float] | None:
    if isinstance(value, int | float):
        return float(value)
    return [float(one) for one in value] if isinstance(value, list | tuple) else None


class ModalityProfile(msgspec.Struct, frozen=True):
    """What `doctor` prints of a modality. `stage` is that of requests with such items, `why_not_features` is empty if
    it is `features`; `max_pixels` is None if clients cannot lower a limit; `counted_by` is the field by which the
    embeddings of an item are counted, empty if only the processor knows; `is_predicted` if an item's header is known
    from the size of the media."""

    limit: int
    stage: StageName
    why_not_features: str
    max_pixels: int | None
    counted_by: str
    is_predicted: bool


class ProfileReport(msgspec.Struct, frozen=True):
    """A profile as data. `merge_size` is the side of the squares of patches that become one embedding."""

    modalities: dict[str, ModalityProfile]
    accepts_item_options: bool
    merge_size: int
    predicts_image_tokens: bool


@dataclass(frozen=True, eq=False)
class ProcessorProfile:
    """What this process has learned of one processor. Not thread-safe until a part has been read."""

    processor: BaseMultiModalProcessor

    @cached_property
    def trial(self) -> TrialItems:
        """The processed samples."""
        return TrialItems(self.processor)

    @cached_property
    def unfit(self) -> Mapping[Modality, str]:
        """Why stage `features` is not used for requests with a modality, of those for which it is not."""
        return learn_unfit(self.processor, lambda: (self.trial, self.checker))

    @property
    def unfit_reason(self) -> str:
        """`unfit` in one line; empty if stage `features` is used for all modalities."""
        return "; ".join(dict.fromkeys(self.unfit.values()))

    @property
    def is_unfit(self) -> bool:
        """Whether stage `features` is used for no modality."""
        accepted = SAMPLES.keys() & accepted_modalities(self.processor)
        return bool(self.unfit) and accepted <= self.unfit.keys()

    @cached_property
    def fallback_stages(self) -> Mapping[Modality, StageName]:
        """The stages of requests with the modalities that are `unfit`."""
        accepted = self.trial.by_modality if self.unfit else {}
        return {m: fallback_stage(self.processor, m, accepted.get(m, ())) for m in self.unfit}

    @cached_property
    def shapes(self) -> Mapping[Modality, ItemShape]:
        """The fields of items, and how their embeddings are counted."""
        return learn_shapes(self.trial, has_positions=self.processor.info.ctx.model_config.uses_mrope)

    @cached_property
    def merge_size(self) -> int:
        """The side of the squares of grid cells that the encoder merges into one embedding; 1 without a grid."""
        return learn_merge_size(self.trial)

    @cached_property
    def max_pixels(self) -> Mapping[Modality, int]:
        """The most pixels of an item, which a request may lower, by the modalities that have such a limit."""
        return learn_max_pixels(self.processor, self.trial)

    @cached_property
    def accepts_item_options(self) -> bool:
        """Whether the items of a request may have pixel limits of their own."""
        return learn_accepts_item_options(self.processor, self.trial, self.max_pixels)

    @cached_property
    def accepts_tensors(self) -> bool:
        """Whether images may be passed to the processor as tensors, which is faster."""
        return "image" in accepted_modalities(self.processor) and VllmProcessor(self.processor).accepts_tensors()

    @cached_property
    def image_tokens(self) -> ImageTokens:
        """What images take at least, by their sizes."""
        return ImageTokens(self.processor, self.trial)

    @cached_property
    def content_fields(self) -> Mapping[Modality, frozenset[str]]:
        """The fields of items with content, by the modalities whose headers are functions of size otherwise."""
        samples = {} if self.is_unfit else self.trial.by_modality
        fit = {modality: items for modality, items in samples.items() if modality not in self.unfit}
        return learn_content_fields(VllmProcessor(self.processor).process, fit)

    @cached_property
    def checker(self) -> FeatureChecker:
        """Validates what a worker gets."""
        return FeatureChecker(
            self.processor, shapes=self.shapes, merge_size=self.merge_size, max_pixels=self.max_pixels
        )

    def assembler(self, *, max_tokens: int) -> VllmAssembler:
        """Return the gateway's assembler of prompts, for models that are not wholly unfit."""
        return VllmAssembler(
            self.processor,
            self.image_tokens,
            max_tokens=max_tokens,
            accepts_item_options=self.accepts_item_options,
            fallback_stages=self.fallback_stages,
            predicted=frozenset(self.content_fields),
        )

    def report(self) -> ProfileReport:
        """Return all of it as data. Computes every part."""
        return ProfileReport(
            modalities={m: self._modality(m, limit) for m, limit in self.processor.info.allowed_mm_limits.items()},
            accepts_item_options=self.accepts_item_options,
            merge_size=self.merge_size,
            predicts_image_tokens=self.image_tokens.is_trusted,
        )

    def _modality(self, modality: Modality, limit: int) -> ModalityProfile:
        shape = self.shapes.get(modality)
        measure = None if shape is None else shape.measure
        return ModalityProfile(
            limit=limit,
            stage=self.fallback_stages.get(modality, "features"),
            why_not_features=self.unfit.get(modality, ""),
            max_pixels=self.max_pixels.get(modality),
            counted_by="" if measure is None else measure.field,
            is_predicted=modality in self.content_fields,
        )
