"""The light half of vLLM's multimodal processor: prompt expansion (implements `prepare.Assembler`).

Theory of operation. Placeholder expansion reads no pixels. So the gateway runs it over items whose large tensors are
stand-ins, by calling the family's own `apply` with the heavy step (`_cached_apply_hf_processor`) replaced, which also
works for families that override `apply`. Stand-ins have the media's true size, on which the token counts of several
families depend. Private methods of vLLM 0.32 are called
by `seams.multimodal`; `tests/contract/test_preparation.py` pins them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.prepare.processor import AssembledPrompt, ImageCost
from medialane.types.errors import FeatureUnsupported, InvalidFeature, PromptRejected, prompt_too_long
from medialane.types.feature import Feature, PlaceholderRange
from medialane.types.media import Modality, StageName
from medialane.vllm_bridge.engine_errors import public_text
from medialane.vllm_bridge.items.features import decode_item_without_tensors
from medialane.vllm_bridge.items.header_values import (
    MALFORMED_FEATURE,
    NO_OPTIONS,
    PlaceholderLayouts,
    decode_options,
)
from medialane.vllm_bridge.items.prepared_input import from_vllm_range
from medialane.vllm_bridge.learned.item_shape import min_embeds
from medialane.vllm_bridge.learned.sized_headers import ImageTokens, Size
from medialane.vllm_bridge.seams.multimodal import expand_prompt
from medialane.vllm_bridge.seams.stand_ins import ValueUnknown


class VllmAssembler:
    """Expands prompts from headers and sizes. Not thread-safe. Without `images`, no image's cost is predicted."""

    def __init__(
        self,
        processor: BaseMultiModalProcessor,
        images: ImageTokens | None = None,
        *,
        max_tokens: int = sys.maxsize,
        accepts_item_options: bool = False,
        unfit_stages: Mapping[Modality, StageName] = MappingProxyType({}),
        predicted: frozenset[Modality] = frozenset(),
    ) -> None:
        self.max_tokens = max_tokens
        self.accepts_item_options = accepts_item_options
        self.unfit_stages = unfit_stages
        self.predicted = predicted
        self._processor = processor
        self._images = images
        self._layouts = PlaceholderLayouts(processor)

    def assemble(self, token_ids: list[int], features: tuple[Feature, ...], options: bytes) -> AssembledPrompt:
        try:
            applied = self._apply(token_ids, features, options)
        except ValueUnknown as error:
            raise FeatureUnsupported("the prompt depends on values that are not in the headers of its items") from error
        except (ValueError, AssertionError, RuntimeError) as error:
            # vLLM raises these if an item has no placeholder in the prompt.
            raise PromptRejected(public_text(error) or "the model's processor refuses this prompt") from error
        except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
            if options == NO_OPTIONS:
                raise FeatureUnsupported("the model's processor cannot expand the prompt from its items") from error
            raise PromptRejected("the model's processor does not support these mm_processor_kwargs") from error
        ranges = {modality: iter(places) for modality, places in placeholder_ranges(applied).items()}
        try:
            placeholders = tuple([next(ranges[feature.modality]) for feature in features])
        except (KeyError, StopIteration) as error:  # not all families look for them
            raise PromptRejected("the prompt has fewer placeholders than items") from error
        return AssembledPrompt(
            token_ids=applied["prompt_token_ids"],
            placeholders=placeholders,
            encoder_token_ids=applied.get("encoder_prompt_token_ids"),
        )

    def place(
        self, token_ids: list[int], features: tuple[Feature, ...], ranges: Sequence[PlaceholderRange]
    ) -> Sequence[PlaceholderRange | None]:
        try:
            layout = self._layouts.find(features, NO_OPTIONS, check=lambda: self._check_length(features))
        except (ValueUnknown, *MALFORMED_FEATURE) as error:
            raise InvalidFeature("the model's processor cannot compute placeholders for these features") from error
        return self._layouts.placements(token_ids, features, ranges, layout)

    def image_cost(self, size: Size, options: bytes) -> ImageCost | None:
        return None if self._images is None else self._images.cost(size, options)

    def _apply(self, token_ids: list[int], features: tuple[Feature, ...], options: bytes) -> Any:
        layout = self._layouts.find(features, options, check=lambda: self._check_length(features))
        hashes: dict[str, list[str]] = {}
        for feature in features:
            hashes.setdefault(feature.modality, []).append(feature.mm_hash)
        return expand_prompt(
            self._processor,
            token_ids,
            data=layout.data,
            options=decode_options(options),
            kwargs=layout.kwargs,
            hashes=hashes,
            updates=layout.copied_updates(),
        )

    def _check_length(self, features: Sequence[Feature]) -> None:
        """Raise PromptTooLong before placeholders are made that the prompt cannot have: headers come from preparers,
        which a hostile file may control, and are validated only in the worker."""
        num_tokens = sum(min_embeds(decode_item_without_tensors(feature.header)) for feature in features)
        if num_tokens > self.max_tokens:
            raise prompt_too_long(num_tokens, self.max_tokens)


def placeholder_ranges(applied: Any) -> dict[str, list[PlaceholderRange]]:
    """Return the placeholders in vLLM's result, by modality."""
    return {modality: list(map(from_vllm_range, places)) for modality, places in applied["mm_placeholders"].items()}
