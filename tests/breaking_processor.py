"""vLLM's processor, except that images of certain sizes crash its process."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from collections.abc import Callable

from medialane.prepare import Described, ProcessedItem, Processor
from medialane.types.media import Decoded, FrameBatch, Image, MediaSize, Modality, Video


def _hog() -> None:
    hoard = []
    while True:
        hoard.append(mmap.mmap(-1, 64 << 20))  # address space is what is limited; pages would take seconds


#: By height of an image that is BREAKING_WIDTH pixels wide.
BREAKING_WIDTH = 333
BREAKS: dict[int, Callable[[], object]] = {
    301: lambda: ctypes.string_at(0),
    302: lambda: os.kill(os.getpid(), signal.SIGKILL),
    303: os.abort,
    304: lambda: os._exit(0),
    305: lambda: time.sleep(600),  # time: more than any timeout
    306: _hog,
    307: lambda: 1 // 0,
}


class BreakingProcessor:
    def __init__(self, inner: Processor) -> None:
        self._inner = inner
        self.files = inner.files
        self.settings = inner.settings

    def enter_forkserver(self) -> None:
        self._inner.enter_forkserver()

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        return self._inner.sample(video, io)

    def process(self, media: Decoded, options: bytes) -> ProcessedItem:
        if isinstance(media, Image) and media.pixels.shape[1] == BREAKING_WIDTH:
            BREAKS.get(media.pixels.shape[0], lambda: None)()
        return self._inner.process(media, options)

    def describe(self, modality: Modality, size: MediaSize, options: bytes) -> Described | None:
        return self._inner.describe(modality, size, options)


def build_processor(config: bytes) -> BreakingProcessor:
    from medialane.vllm_bridge.learned import processor_factory  # imports vLLM, which the tests have no use for

    return BreakingProcessor(processor_factory.build_processor(config))
