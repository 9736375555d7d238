"""The light half of vLLM's multimodal processor: prompt expansion (implements `prepare.Assembler`).

Theory of operation. Placeholder expansion reads no pixels. So the gateway runs it over items whose large tensors are
stand-ins, by calling the family's own `apply` with the heavy step (`_cached_apply_hf_processor`) replaced, which also
works for families that override `apply`. Stand-ins have the media's true size, on which the token counts of several
families depend. Private methods of vLLM 0.32 are used; `tests/contract/test_preparation.py` pins them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.core.errors import PromptRejected
from medialane.core.feature import Feature, PlaceholderRange
from medialane.prepare.processor import AssembledPrompt, ImageCost
from medialane.vllm_bridge.error_text import public_text
from medialane.vllm_bridge.image_tokens import ImageTokens
from medialane.vllm_bridge.placeholder_layout import PlaceholderLayout, PlaceholderLayouts, decode_options
from medialane.vllm_bridge.resize_target import Size
from medialane.vllm_bridge.seams.multimodal import expand_prompt, processes_items_apart

#: Families whose prompt updates derive an item's token count from the grid in its feature, not from its size and the
#: options (vLLM 0.32, `_get_prompt_updates` of each). PaddleOCR-VL also has a grid, but counts by size.
#: By name, since importing the models of other families takes seconds.
_TOKENS_BY_GRID = frozenset(
    ("Qwen2VLMultiModalProcessor", "Qwen3VLMultiModalProcessor", "Qwen2_5OmniThinkerMultiModalProcessor")
)


class VllmAssembler:
    """Expands prompts from headers and sizes. Not thread-safe. Without `images`, no image's cost is predicted."""

    def __init__(
        self, processor: BaseMultiModalProcessor, images: ImageTokens | None = None, *, max_tokens: int = sys.maxsize
    ) -> None:
        self.max_tokens = max_tokens
        self._processor = processor
        self._images = images
        self._layouts = PlaceholderLayouts(processor)

    @property
    def accepts_item_options(self) -> bool:
        return any(cls.__name__ in _TOKENS_BY_GRID for cls in type(self._processor).__mro__)

    def assemble(self, token_ids: list[int], features: tuple[Feature, ...], options: bytes) -> AssembledPrompt:
        try:
            applied = self._apply(token_ids, features, options)
        except (ValueError, AssertionError, RuntimeError) as error:
            # vLLM raises these if an item has no placeholder in the prompt.
            raise PromptRejected(public_text(error)) from error
        except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
            if options == b"{}":
                raise
            raise PromptRejected("the model's processor does not support these mm_processor_kwargs") from error
        ranges = {
            modality: iter([_range(found) for found in places])
            for modality, places in applied["mm_placeholders"].items()
        }
        return AssembledPrompt(
            token_ids=applied["prompt_token_ids"], placeholders=tuple(next(ranges[f.modality]) for f in features)
        )

    def image_cost(self, size: Size, options: bytes) -> ImageCost | None:
        return None if self._images is None else self._images.cost(size, options)

    def _apply(self, token_ids: list[int], features: tuple[Feature, ...], options: bytes) -> Any:
        layout = self._layouts.find(features, options)
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
            updates=_copied(layout),
        )


def supports_split(processor: BaseMultiModalProcessor) -> bool:
    """Return whether items of this model may be processed one by one.

    False if the family overrides the step that we replace: its results depend on the number of items in the request
    (DeepSeek-VL2, H2OVL). Such models are served in stages `decoded` and `url`.
    """
    return processes_items_apart(processor)


def _copied(layout: PlaceholderLayout) -> dict[str, list[list[Any]]]:
    """Return new lists, which a family may modify (Qwen-Omni does for the audio of a video); updates are frozen."""
    return {modality: [list(updates) for updates in items] for modality, items in layout.updates.items()}


def _range(found: Any) -> PlaceholderRange:
    is_embed = None if found.is_embed is None else bytes(found.is_embed.to(torch.uint8).numpy())
    return PlaceholderRange(offset=found.offset, length=found.length, is_embed=is_embed)
