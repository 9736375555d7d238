"""The decoding decision that depends on the model: a video's frames. `vllm_bridge` implements it."""

from __future__ import annotations

from typing import Protocol

from medialane.core.media import FrameBatch, Video


class FrameSampler(Protocol):
    """The model's frame sampler."""

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        """Sample the same frames as the engine. `io` is as in `MediaRef`.

        Raises InvalidRequest for options that the sampler does not support, and what `Video.read` raises.
        """
        ...
