"""Where prompts are expanded: on the event loop when that is quick, in one thread else.

Expansion is pure Python over token lists. A thread keeps a long one off the loop, but costs a short one more than the
expansion itself: while the loop is busy, the thread waits for the interpreter lock for up to 5 ms
(`sys.getswitchinterval`). The assembler is not made for two threads: the loop leaves it alone while the thread has it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from medialane.core.feature import Feature, MediaPrompt
from medialane.prepare import AssembledPrompt, Assembler

#: What is expanded on the loop: 0.2 ms for an image of 1024x768, 0.5 ms for four, far below the 10 ms that the loop may
#: take. A photo of 12 megapixels becomes 16 000 tokens, which takes that long.
MAX_TOKENS_ON_LOOP = 4096
MAX_ITEMS_ON_LOOP = 4
MAX_PIXELS_ON_LOOP = 4_000_000


class Assembly:
    """Owns the thread. `close` once."""

    def __init__(self, assembler: Assembler) -> None:
        self._assembler = assembler
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="assemble")
        self._num_in_thread = 0

    async def assemble(self, prompt: MediaPrompt, features: tuple[Feature, ...]) -> AssembledPrompt:
        """Expand the prompt. Raises PromptRejected."""
        if not self._num_in_thread and _runs_on_loop(prompt, features):
            return self._assembler.assemble(prompt.token_ids, features, prompt.options)
        self._num_in_thread += 1
        work = asyncio.get_running_loop().run_in_executor(
            self._executor, self._assembler.assemble, prompt.token_ids, features, prompt.options
        )
        work.add_done_callback(self._leave)  # not when the caller leaves: the thread goes on
        return await asyncio.shield(work)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _leave(self, work: asyncio.Future[AssembledPrompt]) -> None:
        self._num_in_thread -= 1
        if not work.cancelled():
            work.exception()  # its caller has it, or has left


def _runs_on_loop(prompt: MediaPrompt, features: tuple[Feature, ...]) -> bool:
    num_pixels = sum(f.size.width * f.size.height * max(1, f.size.num_frames) for f in features)
    within = len(prompt.token_ids) <= MAX_TOKENS_ON_LOOP and len(features) <= MAX_ITEMS_ON_LOOP
    # With options, vLLM makes a Hugging Face processor of their own for the prompt: 10 ms.
    return within and num_pixels <= MAX_PIXELS_ON_LOOP and prompt.options == b"{}"
