"""Rejects a request by the headers of its images, before they are decoded."""

from __future__ import annotations

from medialane.core.errors import PromptTooLong
from medialane.core.hashing import merged_options
from medialane.core.media import MediaRef
from medialane.gateway.assembly import Assembly


class ImageBudget:
    """The tokens of one request's images, as far as their sizes are known yet."""

    def __init__(self, assembly: Assembly, options: bytes) -> None:
        """`options` are the request's; an item's own are added."""
        self._assembly = assembly
        self._options = options
        self._num_tokens = 0

    async def add(self, ref: MediaRef, width: int, height: int) -> int:
        """Count an image of this size. Return the fewest bytes of its tensors, 0 if unknown.

        Raises PromptTooLong, with vLLM's message, if the images counted so far exceed the maximum model length.
        """
        cost = await self._assembly.image_cost((width, height), merged_options(self._options, ref.options))
        if cost is None:
            return 0
        self._num_tokens += cost.num_tokens
        if self._num_tokens > self._assembly.max_tokens:
            raise PromptTooLong(
                f"The decoder prompt (length at least {self._num_tokens}) is longer than the maximum model length of "
                f"{self._assembly.max_tokens}. Make sure that `max_model_len` is no smaller than the number of text "
                "tokens plus multimodal tokens. For image inputs, the number of image tokens depends on the number of "
                "images, and possibly their aspect ratios as well.",
                param=ref.param,
            )
        return cost.num_bytes
