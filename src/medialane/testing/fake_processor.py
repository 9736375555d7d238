"""A deterministic processor and assembler without an engine, which can inject every kind of fault.

`build_processor` is a factory for the fork server. An item's options select the fault, so tests need no special images.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec
import numpy as np

from medialane.prepare.processor import AssembledPrompt, Described, ImageCost, ProcessedItem
from medialane.types.errors import InvalidImage, PromptRejected, StartupFailed, UnsupportedMediaType
from medialane.types.feature import Feature, PlaceholderRange
from medialane.types.media import Decoded, FrameBatch, Image, MediaSize, Modality, StageName, Video
from medialane.types.tensor import TensorSpec

#: The token that represents one item in an unexpanded prompt.
PLACEHOLDER_TOKEN = 7

#: Side of the square of pixels that becomes one placeholder token.
PATCH_SIDE = 28

Fault = Literal["none", "kill", "abort", "exit", "segfault", "hang", "spin", "hog", "raise", "reject"]


class FakeConfig(msgspec.Struct, frozen=True):
    """How construction behaves: its duration, extra threads, or failure."""

    warm_s: float = 0.0
    num_threads: int = 0
    refusal: str | None = None
    bug: bool = False


class FakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to one item: it sleeps for `sleep_s`, then triggers the fault. Its header depends on its pixels, if
    it is `by_content`, or else on its size."""

    sleep_s: float = 0.0
    fault: Fault = "none"
    scale: float = 1.0
    header_bytes: int = 0
    by_content: bool = False


def build_processor(config: bytes) -> FakeProcessor:
    """Build the processor (a factory); `config` is a JSON FakeConfig, or empty."""
    settings = msgspec.json.decode(config or b"{}", type=FakeConfig)
    time.sleep(settings.warm_s)
    for _ in range(settings.num_threads):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if settings.refusal is not None:
        raise StartupFailed(settings.refusal)
    if settings.bug:
        raise ZeroDivisionError("a bug in the factory")
    return FakeProcessor()


class FakeProcessor:
    """Returns two tensors per item: pixels times `scale` as float32, and height and width as int64. Images only."""

    files = ()
    settings: Mapping[str, str] = MappingProxyType({"processor": "fake"})

    def enter_forkserver(self) -> None:
        """It uses no library."""

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        raise UnsupportedMediaType("the fake supports images only")

    def process(self, media: Decoded, options: bytes) -> ProcessedItem:
        if not isinstance(media, Image):
            raise UnsupportedMediaType("the fake supports images only")
        item_options = msgspec.json.decode(options, type=FakeOptions)
        time.sleep(item_options.sleep_s)
        _FAULTS[item_options.fault]()
        pixels = media.pixels.astype(np.float32) * np.float32(item_options.scale)
        shape = np.array(media.pixels.shape[:2], np.int64)
        size = {"height": media.pixels.shape[0], "width": media.pixels.shape[1]}
        fields = {"sum": int(media.pixels.sum(dtype=np.int64))} if item_options.by_content else size
        header = msgspec.json.encode(fields).ljust(item_options.header_bytes)
        return ProcessedItem(
            header=header,
            specs=(TensorSpec("float32", pixels.shape), TensorSpec("int64", shape.shape)),
            buffers=(pixels.data.cast("B"), shape.data.cast("B")),
            size=media.size,
        )

    def describe(self, modality: Modality, size: MediaSize, options: bytes) -> Described | None:
        if modality != "image":
            raise UnsupportedMediaType("the fake supports images only")
        item = self.process(Image(np.zeros((size.height, size.width, 3), np.uint8)), options)
        by_content = msgspec.json.decode(options, type=FakeOptions).by_content
        return None if by_content else Described(item.header, item.size)


class FakeAssembler:
    """Replaces the n-th placeholder token by one token per patch of the n-th feature."""

    accepts_item_options = False
    predicted: frozenset[Modality] = frozenset({"image"})
    unfit_stages: Mapping[Modality, StageName] = MappingProxyType({})

    def __init__(self, max_tokens: int = sys.maxsize, *, used_pixels: int = 0) -> None:
        """`used_pixels` are what the model uses of a large image."""
        self.max_tokens = max_tokens
        self._used_pixels = used_pixels

    def image_cost(self, size: tuple[int, int], options: bytes) -> ImageCost | None:
        return ImageCost(_num_patches(*size), num_bytes=size[0] * size[1] * 3 * 4, num_pixels=self._used_pixels)

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

    def place(
        self, token_ids: list[int], features: tuple[Feature, ...], ranges: Sequence[PlaceholderRange]
    ) -> Sequence[PlaceholderRange | None]:
        def has(place: PlaceholderRange, feature: Feature) -> bool:
            return token_ids[place.offset : place.end] == [PLACEHOLDER_TOKEN] * num_placeholder_tokens(feature)

        return [place if has(place, each) else None for each, place in zip(features, ranges, strict=True)]


def num_placeholder_tokens(feature: Feature) -> int:
    """Return the number of patches that cover the true size."""
    return _num_patches(feature.size.width, feature.size.height)


def _num_patches(width: int, height: int) -> int:
    return -(-width // PATCH_SIDE) * -(-height // PATCH_SIDE)


def _hog() -> None:
    hoard = [np.ones(1 << 26, np.uint8) for _ in range(32)]  # 2 GiB, unless a limit prevents it
    del hoard


def _raise() -> None:
    raise ZeroDivisionError("a bug in the processor")


def _reject() -> None:
    raise InvalidImage("the fake processor rejects this image")


_FAULTS: dict[Fault, Callable[[], object]] = {
    "none": lambda: None,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "exit": lambda: os._exit(0),
    "segfault": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(3600),
    "spin": lambda: all(itertools.count(1)),
    "hog": _hog,
    "raise": _raise,
    "reject": _reject,
}
