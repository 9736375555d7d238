"""Renders short prompts on the event loop instead of the renderer's thread.

vLLM applies the chat template and tokenizes in a thread. For a short prompt each takes about 0.1 ms, less than the
hand-over to the thread and back; and while the event loop is busy with other requests, the thread waits for the
interpreter's lock, up to `sys.getswitchinterval()` (5 ms) each time.

The event loop does this work only for bodies of at most `MAX_TEXT_BYTES`, and for at most about `MAX_LOOP_S` per
iteration: a small body may contain a thousand prompts. Tokenizers are not thread-safe in general, so it does none
while the thread is working. Chats whose tokenizer also processes blanks for media (`mistral_chat.py`) stay in the
thread: 65 images in 4 KiB take 30 ms.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.renderers import BaseRenderer

from medialane.vllm_bridge.frontend.request_backend import RequestBackend
from medialane.vllm_bridge.items.mistral_chat import tokenizes_blanks
from medialane.vllm_bridge.seams.multimodal import submit_rendering_by

#: Bounds a single call: tokenizing this much takes about 1 ms.
MAX_TEXT_BYTES = 4096

#: No further call is made in the same iteration of the event loop.
MAX_LOOP_S = 0.004

Submit = Callable[..., Any]


def install_inline_rendering(renderer: BaseRenderer, backend: RequestBackend) -> None:
    """Render the short prompts of `backend`'s requests on the event loop, if that takes no longer with media."""
    if tokenizes_blanks(renderer):
        return
    submit_rendering_by(renderer, lambda submit: InlineRendering(submit, backend).submit)


class InlineRendering:
    """Replaces `submit` of the renderer's executor, which is called on the event loop only."""

    def __init__(self, submit: Submit, backend: RequestBackend) -> None:
        self._submit = submit
        self._backend = backend
        self._in_thread: list[Future[Any]] = []
        self._used_s = 0.0

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return the future of the call. A completed one belongs to the loop, which `run_in_executor` returns as it
        is: the caller continues without waiting for an iteration."""
        if not self._is_inline():
            future: Future[Any] = self._submit(work, *args, **kwargs)
            self._in_thread.append(future)
            return future
        loop = asyncio.get_running_loop()
        if not self._used_s:
            loop.call_soon(self._start_iteration)
        started = time.perf_counter()
        done: asyncio.Future[Any] = loop.create_future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised by the caller's await
            done.set_exception(error)
        self._used_s += time.perf_counter() - started
        return done

    def _is_inline(self) -> bool:
        size = self._backend.text_bytes
        if size is None or size > MAX_TEXT_BYTES or self._used_s > MAX_LOOP_S:
            return False
        self._in_thread = [future for future in self._in_thread if not future.done()]
        return not self._in_thread

    def _start_iteration(self) -> None:
        self._used_s = 0.0
