"""Decoding decisions that depend on the model: video frames, image size. `vllm_bridge` implements these protocols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from medialane.core.media import FrameBatch, Video

Size = tuple[int, int]


class FrameSampler(Protocol):
    """The model's frame sampler."""

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        """Sample the same frames as the engine. `io` is as in `MediaRef`.

        Raises InvalidRequest for options that the sampler does not support, and what `Video.read` raises.
        """
        ...


class SizeChooser(Protocol):
    """Chooses the decoding size of images for the model's processor."""

    def smaller_size(self, size: Size, smaller: Sequence[Size]) -> Size | None:
        """Return the first of `smaller` at which an image of `size` may be decoded; all (width, height), as displayed.

        It must have at least twice the width and height that the processor resizes such an image to, and give features
        with the same shapes and the same small values. None if none qualifies, or the processor's target is unknown.
        """
        ...
