"""A processor and an assembler without an engine: deterministic, and able to fail in every way a real one can.

`build_processor` is a factory as the fork server takes it. The options of an item choose the fault, so a test needs no
special pictures.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from medialane.core.errors import InvalidImage, PromptRejected, PromptTooLong, StartupFailed, UnsupportedMediaType
from medialane.core.feature import Feature, PlaceholderRange
from medialane.core.media import Decoded, FrameBatch, Image, Video
from medialane.core.tensor import TensorSpec
from medialane.prepare.processor import AssembledPrompt, ProcessedItem

#: The token that stands for one item in a prompt that is not expanded yet.
PLACEHOLDER_TOKEN = 7

#: Side of the square of pixels that becomes one placeholder token.
PATCH_SIDE = 28

Fault = Literal["none", "kill", "abort", "exit", "segfault", "hang", "hog", "raise", "reject"]


class FakeConfig(msgspec.Struct, frozen=True):
    """How the fake's construction goes: how long, with how many extra threads, or to which refusal."""

    warm_s: float = 0.0
    num_threads: int = 0
    refusal: str | None = None
    bug: bool = False


class FakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to one item: `sleep_s` of work, then the fault. `hog` and a larger `scale` take memory.

    One that `shrinks` may be decoded at the smallest size there is; one of more than `max_pixels` has too many tokens.
    """

    sleep_s: float = 0.0
    fault: Fault = "none"
    scale: float = 1.0
    header_bytes: int = 0
    shrinks: bool = False
    max_pixels: int = 1 << 40


def build_processor(config: bytes) -> FakeProcessor:
    """Factory: `config` is a JSON FakeConfig, or empty."""
    wanted = msgspec.json.decode(config or b"{}", type=FakeConfig)
    time.sleep(wanted.warm_s)
    for _ in range(wanted.num_threads):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if wanted.refusal is not None:
        raise StartupFailed(wanted.refusal)
    if wanted.bug:
        raise ZeroDivisionError("a bug in the factory")
    return FakeProcessor()


class FakeProcessor:
    """Two tensors an item: pixels times `scale` as float32, and height and width as int64. Images only."""

    files = ()

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        raise UnsupportedMediaType("the fake takes images only")

    def check_size(self, size: tuple[int, int], options: bytes) -> None:
        if size[0] * size[1] > msgspec.json.decode(options, type=FakeOptions).max_pixels:
            raise PromptTooLong("the fake's prompts are shorter than that")

    def smaller_size(
        self, size: tuple[int, int], smaller: Sequence[tuple[int, int]], options: bytes
    ) -> tuple[int, int] | None:
        return smaller[0] if msgspec.json.decode(options, type=FakeOptions).shrinks else None

    def process(self, media: Decoded, options: bytes) -> ProcessedItem:
        if not isinstance(media, Image):
            raise UnsupportedMediaType("the fake takes images only")
        wanted = msgspec.json.decode(options, type=FakeOptions)
        time.sleep(wanted.sleep_s)
        _FAULTS[wanted.fault]()
        pixels = media.pixels.astype(np.float32) * np.float32(wanted.scale)
        shape = np.array(media.pixels.shape[:2], np.int64)
        header = msgspec.json.encode({"sum": int(media.pixels.sum(dtype=np.int64))}).ljust(wanted.header_bytes)
        return ProcessedItem(
            header=header,
            specs=(TensorSpec("float32", pixels.shape), TensorSpec("int64", shape.shape)),
            buffers=(pixels.data.cast("B"), shape.data.cast("B")),
            size=media.size,
        )


class FakeAssembler:
    """Replaces the n-th placeholder token by one token per patch of the n-th feature."""

    accepts_item_options = False

    def assemble(self, token_ids: list[int], features: tuple[Feature, ...], options: bytes) -> AssembledPrompt:
        if token_ids.count(PLACEHOLDER_TOKEN) != len(features):
            raise PromptRejected(
                f"the prompt has {token_ids.count(PLACEHOLDER_TOKEN)} placeholders for {len(features)} items"
            )
        expanded: list[int] = []
        placeholders: list[PlaceholderRange] = []
        waiting = iter(features)
        for token in token_ids:
            if token != PLACEHOLDER_TOKEN:
                expanded.append(token)
                continue
            length = num_placeholder_tokens(next(waiting))
            placeholders.append(PlaceholderRange(offset=len(expanded), length=length))
            expanded += [PLACEHOLDER_TOKEN] * length
        return AssembledPrompt(token_ids=expanded, placeholders=tuple(placeholders))


def num_placeholder_tokens(feature: Feature) -> int:
    """Whole or begun patches of the true size."""
    return -(-feature.size.width // PATCH_SIDE) * -(-feature.size.height // PATCH_SIDE)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    time.sleep(3600)


def _hog() -> None:
    hoard = [np.ones(1 << 26, np.uint8) for _ in range(32)]  # 2 GiB, where nothing forbids it
    del hoard


def _segfault() -> None:
    ctypes.string_at(0)


def _raise() -> None:
    raise ZeroDivisionError("a bug in the processor")


def _reject() -> None:
    raise InvalidImage("the fake processor does not take this image")


def _exit() -> None:
    os._exit(0)


def _nothing() -> None:
    return


_FAULTS = {
    "none": _nothing,
    "kill": _kill,
    "abort": os.abort,
    "exit": _exit,
    "segfault": _segfault,
    "hang": _hang,
    "hog": _hog,
    "raise": _raise,
    "reject": _reject,
}
