"""Finds out at start of which modalities this model's items may be processed one by one (stage `features`).

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.prepare.processor import AssembledPrompt
from medialane.types.errors import MedialaneError
from medialane.types.feature import Feature, MediaPayload
from medialane.types.media import Decoded, Modality
from medialane.types.request import ExpandedPrompt
from medialane.types.stage import RAW_STAGE, StageName
from medialane.vllm_bridge.items.assembler import VllmAssembler, placeholder_ranges
from medialane.vllm_bridge.items.features import decode_item_without_tensors
from medialane.vllm_bridge.items.header_values import MALFORMED_FEATURE, NO_OPTIONS
from medialane.vllm_bridge.items.mistral_chat import chat_of_blanks, expand_marks
from medialane.vllm_bridge.items.preparation import engine_media
from medialane.vllm_bridge.items.trial_items import SAMPLES, TrialItem, TrialItems, attempt
from medialane.vllm_bridge.items.validation import FeatureChecker
from medialane.vllm_bridge.seams.multimodal import (
    accepted_modalities,
    process_whole,
    processes_items_apart,
    unknown_modalities,
)

logger = logging.getLogger(__name__)

#: The items of a processor, and a checker by what was learned from them.
MakeTrial = Callable[[], tuple[TrialItems, FeatureChecker]]


def learn_unfit(processor: BaseMultiModalProcessor, make_trial: MakeTrial) -> Mapping[Modality, str]:
    """Return why stage `features` is not used for requests with a modality, of those for which it is not."""
    modalities = [modality for modality in SAMPLES if modality in accepted_modalities(processor)]
    if unknown := unknown_modalities(processor):
        reason = f"media are refused: this model takes them as {', '.join(unknown)}, which is not supported"
        return dict.fromkeys(SAMPLES, reason)
    if not processes_items_apart(processor):
        reason = "the results of the model's processor depend on the number of items in a request"
        return dict.fromkeys(modalities, reason)

    def trial() -> _Trial:
        expand_marks(processor)
        return _Trial(processor, *make_trial())

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
    """Return a prompt with the placeholders of so many items."""
    tokenizer = processor.info.get_tokenizer()
    text = processor.dummy_inputs.get_dummy_text({modality: count})  # empty for a Mistral tokenizer
    return chat_of_blanks(tokenizer, modality, count) or list(tokenizer.encode(text, add_special_tokens=False))


def _failure(error: Exception, of: str = "") -> str:
    logger.info("the trial of stage features%s failed", of, exc_info=error)
    return _line(f"the model's processor fails with items{of} of a trial: {type(error).__name__}: {error}")


def _line(text: str) -> str:
    """Return a message that may contain another library's, as one line of a log."""
    return " ".join(text.split())[:300]
