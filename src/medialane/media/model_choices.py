"""What decoding asks of a model: the frames of a video, the size of an image. `vllm_bridge` fills these protocols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from medialane.core.media import FrameBatch, Video

Size = tuple[int, int]

#: Raises MedialaneError for a (width, height), as stored, that the model cannot be given: before pixels are decoded.
SizeCheck = Callable[[Size], None]


class FrameSampler(Protocol):
    """The model's choice of frames."""

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        """Take the frames that the engine itself would take. `io` is as in `MediaRef`.

        Raises InvalidRequest for options that the sampler does not take, and what `Video.read` raises.
        """
        ...


class SizeChooser(Protocol):
    """What the model's processor makes of images of several sizes."""

    def smaller_size(self, size: Size, smaller: Sequence[Size]) -> Size | None:
        """The first of `smaller` that an image of `size` may be decoded at. All are (width, height), as displayed.

        It must have at least twice the width and height that the processor resizes such an image to, and give features
        of the same shapes and the same small values. None if none does, or if the processor does not tell.
        """
        ...
