"""Which frames of a video a model is given, as this room needs to know it; `vllm_bridge` fills it."""

from __future__ import annotations

from typing import Protocol

from medialane.core.media import FrameBatch, Video


class FrameSampler(Protocol):
    """The model's choice of frames."""

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        """Take the frames that the engine itself would take. `io` is as in `MediaRef`.

        Raises InvalidRequest for options that the sampler does not take, and what `Video.read` raises.
        """
        ...
