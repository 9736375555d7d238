"""What is learned at start of a model's processor, in one place: `ModelProfile`.

vLLM's processors declare little of what the gateway and validation need to know, so it is found out by processing some
samples (`item_shape`), each once per process. Whoever needs a part gets the object; a part is computed when it is
first read, because store, gateway and worker need different ones and are to start quickly. `medialane doctor MODEL`
prints the whole.

In which form a model accepts embeddings of clients is not part of it: that takes the weights, so each engine process
tries it (`engine_core`).

It also has for which modalities this model's items may be processed one by one (stage `features`).

Theory of operation. Stage `features` assumes that an item's tensors do not depend on the request's other items, that
they can be sent, and that the prompt can be expanded and validated from their headers. No list of models says for
which that is so: one and two items of each modality are processed, here, by the model's own processor, separately and
as a whole request. If the prompts differ, or anything fails, requests with that modality are served in the next stage
(`decoded`): vLLM's own renderer in the worker processes them. The result is one of the processor settings, which
gateway, store and worker compare: they use `features` only if all of them have the same.

Tensors are not compared: where a family pads an item to the request's largest, its model drops the padding.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.prepare.processor import AssembledPrompt
from medialane.types.errors import MedialaneError
from medialane.types.feature import Feature, MediaPayload
from medialane.types.media import RAW_STAGE, Decoded, Modality, StageName
from medialane.types.request import ExpandedPrompt
from medialane.vllm_bridge.items.features import decode_item_without_tensors
from medialane.vllm_bridge.items.header_values import MALFORMED_FEATURE, NO_OPTIONS
from medialane.vllm_bridge.items.mistral_chat import chat_of_blanks, expand_marks
from medialane.vllm_bridge.items.preparation import VllmProcessor, engine_media
from medialane.vllm_bridge.learned.assembler import VllmAssembler, placeholder_ranges
from medialane.vllm_bridge.learned.item_shape import (
    SAMPLES,
    ItemShape,
    TrialItem,
    TrialItems,
    attempt,
    learn_merge_size,
    learn_shapes,
)
from medialane.vllm_bridge.learned.sized_headers import (
    ImageTokens,
    learn_accepts_item_options,
    learn_content_fields,
    learn_max_pixels,
)
from medialane.vllm_bridge.learned.validation import FeatureChecker
from medialane.vllm_bridge.seams.multimodal import (
    accepted_modalities,
    device_normalisation,
    hf_processor_of,
    process_whole,
    processes_items_apart,
    unknown_modalities,
)

#: Attributes of Hugging Face's image processors; video processors have the same.
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
    """What `doctor` prints of a modality. `stage` is the stage of requests with such items, `why_not_features` is empty
    if it is `features`; `max_pixels` is None if clients cannot lower a limit; `counted_by` is the field by which the
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
class ModelProfile:
    """What this process has learned of one processor. Not thread-safe until a part has been read."""

    processor: BaseMultiModalProcessor

    @cached_property
    def trial(self) -> TrialItems:
        """The processed samples."""
        return TrialItems(self.processor)

    @cached_property
    def unfit(self) -> Mapping[Modality, str]:
        """Why stage `features` is not used for requests with a modality, by modality, where it is not."""
        return learn_unfit(self)

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
    def unfit_stages(self) -> Mapping[Modality, StageName]:
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
            unfit_stages=self.unfit_stages,
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
            stage=self.unfit_stages.get(modality, "features"),
            why_not_features=self.unfit.get(modality, ""),
            max_pixels=self.max_pixels.get(modality),
            counted_by="" if measure is None else measure.field,
            is_predicted=modality in self.content_fields,
        )


logger = logging.getLogger(__name__)


def learn_unfit(profile: ModelProfile) -> Mapping[Modality, str]:
    """Return why stage `features` is not used for requests with a modality, by modality, where it is not."""
    processor = profile.processor
    modalities = [modality for modality in SAMPLES if modality in accepted_modalities(processor)]
    if unknown := unknown_modalities(processor):
        reason = f"media are refused: this model takes them as {', '.join(unknown)}, which is not supported"
        return dict.fromkeys(SAMPLES, reason)
    if not processes_items_apart(processor):
        reason = "the results of the model's processor depend on the number of items in a request"
        return dict.fromkeys(modalities, reason)

    def trial() -> _Trial:
        expand_marks(processor)
        return _Trial(processor, profile.trial, profile.checker)

    whole_and_apart = attempt(trial)
    if isinstance(whole_and_apart, Exception):
        return dict.fromkeys(modalities, _failure(whole_and_apart))
    reasons = {modality: whole_and_apart.reason(modality) for modality in modalities}
    return {modality: reason for modality, reason in reasons.items() if reason}


def fallback_stage(processor: BaseMultiModalProcessor, modality: Modality, accepted: Sequence[TrialItem]) -> StageName:
    """Return the stage of requests with a modality that is unfit: the next one, or `url`, in which vLLM's own loaders
    decode, if its processor accepts no sample in the form in which we decode. `accepted` are those processed one by
    one."""
    return "decoded" if accepted or _accepts_whole(processor, modality) else RAW_STAGE


def _accepts_whole(processor: BaseMultiModalProcessor, modality: Modality) -> bool:
    for sample in SAMPLES[modality]:
        whole = attempt(_whole, processor, modality, [sample])
        if not isinstance(whole, Exception):
            return True
        logger.info("a request with one %s of a trial is refused: %r", modality, whole)
    return False


def _whole(processor: BaseMultiModalProcessor, modality: Modality, media: Sequence[Decoded]) -> Any:
    """Return the prompt of these items as plain vLLM makes it."""
    token_ids = _prompt(processor, modality, len(media))
    return process_whole(processor, token_ids, {modality: [engine_media(one) for one in media]})


def process_one(processor: BaseMultiModalProcessor, modality: Modality, loaded: Any) -> Any:
    """Return the prompt of one item, as vLLM's loaders return it, as plain vLLM makes it."""
    return process_whole(processor, _prompt(processor, modality, 1), {modality: [loaded]})


class _Trial:
    """Processes prompts of one modality in both ways."""

    def __init__(self, processor: BaseMultiModalProcessor, items: TrialItems, checker: FeatureChecker) -> None:
        self._limits = processor.info.allowed_mm_limits
        self._processor = processor
        self._items = items
        self._checker = checker
        self._assembler = VllmAssembler(processor)

    def reason(self, modality: Modality) -> str:
        """Return why items of this modality are not processed separately; empty if they are."""
        largest = self._items.by_modality[modality][:-3:-1]
        if not largest:
            return _line(f"no {modality} of a trial can be processed separately: {self._items.refusals[modality]}")
        prompts = [largest[:1], largest[1:], *([largest] if self._limits[modality] > 1 else [])]
        for prompt in filter(None, prompts):
            reason = attempt(self._reason_of, modality, prompt)
            if reason:
                return _failure(reason, f" of {modality}") if isinstance(reason, Exception) else reason
        return ""

    def _reason_of(self, modality: Modality, items: Sequence[TrialItem]) -> str:
        """Return in what the two ways differ for a prompt with these items; empty if they do not."""
        what = f"{len(items)} {modality} item(s)"
        try:
            whole = _whole(self._processor, modality, [item.media for item in items])
            places = placeholder_ranges(whole)[modality]
        except MALFORMED_FEATURE:
            return ""  # not a prompt that vLLM would serve
        features = tuple(Feature(modality, f"{n:064x}", item.header, (), item.size) for n, item in enumerate(items))
        try:
            token_ids = _prompt(self._processor, modality, len(items))
            assembled = self._assembler.assemble(token_ids, features, NO_OPTIONS)
            self._check(features, assembled)
        except MedialaneError as error:
            return f"a prompt with {what} is not expanded from the items' headers: {error.message}"
        expected = whole["prompt_token_ids"], whole.get("encoder_prompt_token_ids"), places
        if (assembled.token_ids, assembled.encoder_token_ids, list(assembled.placeholders)) != expected:
            return f"a prompt with {what} is expanded otherwise if the items are processed separately"
        return ""

    def _check(self, features: Sequence[Feature], assembled: AssembledPrompt) -> None:
        payloads = tuple(
            MediaPayload(feature.modality, feature.mm_hash, feature.header, (), feature.size, place)
            for feature, place in zip(features, assembled.placeholders, strict=True)
        )
        decoded = [decode_item_without_tensors(feature.header) for feature in features]
        prompt = ExpandedPrompt(assembled.token_ids, payloads, encoder_token_ids=assembled.encoder_token_ids)
        self._checker.check(prompt, decoded)


def _prompt(processor: BaseMultiModalProcessor, modality: Modality, count: int) -> list[int]:
    """Return a prompt with the placeholders of that many items."""
    tokenizer = processor.info.get_tokenizer()
    text = processor.dummy_inputs.get_dummy_text({modality: count})  # empty for a Mistral tokenizer
    return chat_of_blanks(tokenizer, modality, count) or list(tokenizer.encode(text, add_special_tokens=False))


def _failure(error: Exception, of: str = "") -> str:
    logger.info("the trial of stage features%s failed", of, exc_info=error)
    return _line(f"the model's processor fails with items{of} of a trial: {type(error).__name__}: {error}")


def _line(text: str) -> str:
    """Return a message that may contain another library's, as one line of a log."""
    return " ".join(text.split())[:300]
