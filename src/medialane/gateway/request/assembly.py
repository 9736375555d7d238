"""Expands prompts: short ones on the event loop, others in one thread, which also predicts what images take.

Expansion is pure Python over token lists. A thread keeps a long one from blocking the event loop, but costs a short one
more than the expansion itself: while the loop is busy, the thread waits up to 5 ms for the GIL
(`sys.getswitchinterval`). The assembler is not thread-safe: the loop does not use it while the thread does.

And what the images of a request take, by which it is refused before they are decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cachetools import LRUCache

from medialane.gateway.admission import MustWait, Preparation
from medialane.prepare import AssembledPrompt, Assembler, ImageCost
from medialane.types.errors import prompt_too_long
from medialane.types.feature import Feature, MediaPrompt, PlaceholderRange
from medialane.types.hashing import merged_options
from medialane.types.media import MediaRef

#: Limits for expansion on the event loop, which may be blocked for 10 ms: tokens of the expanded prompt, as predicted,
#: and items. Ten pages of a document take 0.2 ms, the first ones of their size 1.6 ms; 100 small images 1.1 and 7.6.
MAX_TOKENS_ON_LOOP = 8192

MAX_ITEMS_ON_LOOP = 16

#: Of an item that is no image, or whose tokens cannot be predicted: the squares of many families, and Whisper's 20 ms.
_PIXELS_PER_TOKEN, _SAMPLES_PER_TOKEN = 28 * 28, 320

#: Cached predictions, in combinations of size and options. With longer options there is none: they are a client's.
MAX_COSTS = 2048

MAX_OPTIONS_BYTES = 256

T = TypeVar("T")


class Assembly:
    """Owns the thread. `close` once."""

    def __init__(self, assembler: Assembler) -> None:
        self.max_tokens = assembler.max_tokens
        self._assembler = assembler
        self._costs: LRUCache[object, ImageCost | None] = LRUCache(MAX_COSTS)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="assemble")
        self._num_in_thread = 0

    async def assemble(self, prompt: MediaPrompt, features: tuple[Feature, ...]) -> AssembledPrompt:
        """Expand the placeholders of the prompt. Raises PromptRejected."""
        if self._runs_on_loop(prompt, features):
            return self._assembler.assemble(prompt.token_ids, features, prompt.options)
        return await self._in_thread(self._assembler.assemble, prompt.token_ids, features, prompt.options)

    async def place(
        self, token_ids: list[int], features: tuple[Feature, ...], ranges: Sequence[PlaceholderRange]
    ) -> Sequence[PlaceholderRange | None]:
        """See `Assembler.place`. Raises InvalidFeature, PromptTooLong."""
        prompt = MediaPrompt(token_ids, ())
        if self._runs_on_loop(prompt, features):
            return self._assembler.place(token_ids, features, ranges)
        return await self._in_thread(self._assembler.place, token_ids, features, ranges)

    async def image_cost(self, size: tuple[int, int], options: bytes) -> ImageCost | None:
        """Return what an image of this size takes at least; None if that cannot be predicted."""
        if len(options) > MAX_OPTIONS_BYTES:
            return None
        if (key := (size, options)) in self._costs:
            return self._costs[key]
        cost = self._costs[key] = await self._in_thread(self._assembler.image_cost, size, options)
        return cost

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _runs_on_loop(self, prompt: MediaPrompt, features: tuple[Feature, ...]) -> bool:
        # For a prompt with options, vLLM creates a separate Hugging Face processor: 10 ms.
        if self._num_in_thread or len(features) > MAX_ITEMS_ON_LOOP or prompt.options != b"{}":
            return False
        return len(prompt.token_ids) + sum(map(self._num_tokens, features)) <= MAX_TOKENS_ON_LOOP

    def _num_tokens(self, feature: Feature) -> int:
        size = feature.size
        cost = self._costs.get(((size.width, size.height), b"{}")) if feature.modality == "image" else None
        if cost is not None:
            return cost.num_tokens
        num_pixels = size.width * size.height * max(1, size.num_frames)
        return num_pixels // _PIXELS_PER_TOKEN + size.num_samples // _SAMPLES_PER_TOKEN

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        self._num_in_thread += 1
        work = asyncio.get_running_loop().run_in_executor(self._executor, call, *args)
        work.add_done_callback(self._on_done)  # not when the caller is cancelled: the thread continues
        return await asyncio.shield(work)

    def _on_done(self, work: asyncio.Future[Any]) -> None:
        self._num_in_thread -= 1
        if not work.cancelled():
            work.exception()  # marks it as retrieved: the caller has raised it, or was cancelled


class ImageBudget:
    """The images of one request, by their fields, as far as their sizes are known yet."""

    def __init__(self, assembly: Assembly, options: bytes, preparation: Preparation | None = None) -> None:
        """`options` are the request's; an item's own are added. With a `preparation`, items that are not cached wait
        for it to begin."""
        self._assembly = assembly
        self._preparation = preparation
        self._options = options
        self._num_tokens = 0
        #: By field and form, the bytes of an image's pixels, and the fewest of its tensors.
        self._images: dict[str, dict[str, int]] = {}

    def has_counted(self, ref: MediaRef) -> bool:
        return ref.param in self._images

    def num_bytes(self, ref: MediaRef, form: str) -> int:
        """Return the fewest bytes of the image once it is `decoded` or `processed`; 0 if unknown."""
        return self._images.get(ref.param, {}).get(form, 0)

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
        num_bytes = self._images[ref.param] = {"decoded": width * height * 3}
        cost = await self._assembly.image_cost((width, height), merged_options(self._options, ref.options))
        if cost is None:
            return
        num_bytes["processed"] = cost.num_bytes
        self._num_tokens += cost.num_tokens
        if self._num_tokens > self._assembly.max_tokens:
            raise prompt_too_long(self._num_tokens, self._assembly.max_tokens)
