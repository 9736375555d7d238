"""Settings of media preparation: number of processes, timeouts, memory limit."""

from __future__ import annotations

import os

import msgspec
from msgspec import field

from medialane.types.media import MediaSource
from medialane.types.setting import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, check_bounds

GIB = 1024 * 1024 * 1024


class PrepareConfig(msgspec.Struct, frozen=True):
    num_preparers: NonNegativeInt = field(default=0, name="preparers")
    """processes that decode and process media; 0: number of cores minus one, at least 1"""
    queue_limit: PositiveInt = field(default=256, name="prepare-queue-limit")
    """most items that wait for a preparer; more get 503"""
    queue_timeout_s: PositiveFloat = field(default=30.0, name="prepare-queue-timeout")
    """longest wait for a preparer, then 503"""
    image_timeout_s: PositiveFloat = field(default=10.0, name="prepare-image-timeout")
    """longest time to decode and process one image; then its preparer is killed"""
    audio_timeout_s: PositiveFloat = field(default=20.0, name="prepare-audio-timeout")
    """the same for one audio item"""
    video_timeout_s: PositiveFloat = field(default=60.0, name="prepare-video-timeout")
    """the same for one video"""
    document_timeout_s: PositiveFloat = field(default=20.0, name="prepare-document-timeout")
    """longest time to open a document and read its text; its pages are images"""
    start_timeout_s: PositiveFloat = field(default=120.0, name="prepare-start-timeout")
    """longest time to load and warm up the model's processor"""
    memory_limit_bytes: NonNegativeInt = field(default=4 * GIB, name="prepare-memory-limit-bytes")
    """most address space that a preparer may add to its initial size; 0: no limit"""
    max_jobs_per_preparer: NonNegativeInt = field(default=1000, name="prepare-max-jobs-per-preparer")
    """jobs after which a preparer is replaced, which ends a takeover by a hostile file; 0: never"""
    max_preparer_age_s: NonNegativeFloat = field(default=300.0, name="prepare-max-preparer-age")
    """age after its first job at which a preparer is replaced; 0: never"""

    def validate(self) -> None:
        """Raise StartupFailed naming the first invalid setting."""
        check_bounds(self)

    def job_timeout_s(self, source: MediaSource) -> float:
        """Return the timeout in seconds of one job of this modality, or that opens a document."""
        timeout_s: float = getattr(self, f"{source}_timeout_s")
        return timeout_s

    def resolved_num_preparers(self) -> int:
        """Return the number of preparers; by default the CPUs in this process's affinity mask minus one."""
        return self.num_preparers or max(1, len(os.sched_getaffinity(0)) - 1)
