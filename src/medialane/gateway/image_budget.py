"""Rejects a request by the headers of its images, before they are decoded."""

from __future__ import annotations

from typing import NamedTuple

from medialane.gateway.admission import MustWait, Preparation
from medialane.gateway.assembly import Assembly
from medialane.types.errors import prompt_too_long
from medialane.types.hashing import merged_options
from medialane.types.media import MediaRef


class _Image(NamedTuple):
    """Bytes of an image's pixels, and the fewest of its tensors."""

    decoded_bytes: int = 0
    processed_bytes: int = 0


class ImageBudget:
    """The images of one request, by their fields, as far as their sizes are known yet."""

    def __init__(self, assembly: Assembly, options: bytes, preparation: Preparation | None = None) -> None:
        """`options` are the request's; an item's own are added. With a `preparation`, items that are not cached wait
        for it to begin."""
        self._assembly = assembly
        self._preparation = preparation
        self._options = options
        self._num_tokens = 0
        self._images: dict[str, _Image] = {}

    def has_counted(self, ref: MediaRef) -> bool:
        return ref.param in self._images

    def decoded_bytes(self, ref: MediaRef) -> int:
        """Return the bytes of the image's pixels; 0 if it has not been counted, as for `processed_bytes`."""
        return self._images.get(ref.param, _Image()).decoded_bytes

    def processed_bytes(self, ref: MediaRef) -> int:
        """Return the fewest bytes of the image's tensors; 0 if unknown."""
        return self._images.get(ref.param, _Image()).processed_bytes

    def missing(self) -> None:
        """Note that an item is not cached, before it is prepared or its file is copied. Raises MustWait."""
        if self._preparation is not None and not self._preparation.begin():
            raise MustWait

    async def wait(self) -> None:
        """Wait until missing items may be prepared. Raises QueueFull, QueueTimeout."""
        if self._preparation is not None:
            await self._preparation.wait()

    async def add(self, ref: MediaRef, width: int, height: int) -> None:
        """Count an image of this size, once.

        Raises PromptTooLong, with vLLM's message, if the images counted so far exceed the maximum model length.
        """
        if self.has_counted(ref):
            return
        self._images[ref.param] = _Image(width * height * 3)
        cost = await self._assembly.image_cost((width, height), merged_options(self._options, ref.options))
        if cost is None:
            return
        self._images[ref.param] = _Image(width * height * 3, cost.num_bytes)
        self._num_tokens += cost.num_tokens
        if self._num_tokens > self._assembly.max_tokens:
            raise prompt_too_long(self._num_tokens, self._assembly.max_tokens)
