"""Settings of media preparation: number of processes, timeouts, memory limit."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec

from medialane.core.errors import StartupFailed
from medialane.core.media import Modality

GIB = 1024 * 1024 * 1024


class PrepareConfig(msgspec.Struct, frozen=True):
    num_preparers: Annotated[
        int,
        msgspec.Meta(
            description="processes that decode and process media; 0 is the number of cores minus one, at least 1"
        ),
    ] = 0
    queue_limit: Annotated[
        int, msgspec.Meta(description="most items that wait for a preparer; more get 503 with Retry-After")
    ] = 256
    queue_timeout_s: Annotated[
        float, msgspec.Meta(description="longest wait for a preparer, then 503 with Retry-After")
    ] = 30.0
    image_timeout_s: Annotated[
        float, msgspec.Meta(description="longest time to decode and process one image; then its preparer is killed")
    ] = 10.0
    audio_timeout_s: Annotated[float, msgspec.Meta(description="the same for one audio item")] = 20.0
    video_timeout_s: Annotated[float, msgspec.Meta(description="the same for one video")] = 60.0
    start_timeout_s: Annotated[
        float, msgspec.Meta(description="longest time to load and warm up the model's processor")
    ] = 120.0
    memory_limit_bytes: Annotated[
        int,
        msgspec.Meta(
            description="most address space that a preparer may add to its initial size; 0 disables the limit"
        ),
    ] = 4 * GIB
    max_jobs_per_preparer: Annotated[
        int, msgspec.Meta(description="jobs after which a preparer is replaced; 0 is never")
    ] = 0

    def validate(self) -> None:
        """Raise StartupFailed naming the first invalid setting."""
        for name in ("num_preparers", "memory_limit_bytes", "max_jobs_per_preparer"):
            if getattr(self, name) < 0:
                raise StartupFailed(f"{name} must not be negative")
        for name in (
            "queue_limit",
            "queue_timeout_s",
            "image_timeout_s",
            "audio_timeout_s",
            "video_timeout_s",
            "start_timeout_s",
        ):
            if getattr(self, name) <= 0:
                raise StartupFailed(f"{name} must be positive")

    def job_timeout_s(self, modality: Modality) -> float:
        """Return the timeout of one job of this modality in seconds."""
        return {"image": self.image_timeout_s, "audio": self.audio_timeout_s, "video": self.video_timeout_s}[modality]

    def resolved_num_preparers(self) -> int:
        """Return the number of preparers; by default the CPUs in this process's affinity mask minus one."""
        return self.num_preparers or max(1, len(os.sched_getaffinity(0)) - 1)
