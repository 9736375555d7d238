"""Settings of the arena."""

from __future__ import annotations

import math
import os

import msgspec
from msgspec import field

from medialane.arena.locks import reclaimable_bytes
from medialane.runtime.linux import file_system_type
from medialane.types.errors import StartupFailed
from medialane.types.feature import EntryKind
from medialane.types.setting import format_bytes

MIB = 1 << 20
GIB = 1 << 30
MIN_BYTES = 16 * MIB

#: TMPFS_MAGIC of linux/magic.h.
_TMPFS = 0x01021994


class ArenaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Size and location of the shared memory for media."""

    size_bytes: int = field(default=2 * GIB, name="arena-size")
    """shared memory for media, one file per host (at least 16 MiB)"""
    encoded_share: float = field(default=0.25, name="arena-encoded-share")
    """share of encoded media (as fetched or sent); a kind over its share is evicted first"""
    decoded_share: float = field(default=0.5, name="arena-decoded-share")
    """the same for decoded media"""
    processed_share: float = field(default=1.0, name="arena-processed-share")
    """the same for processed media"""
    embedded_share: float = field(default=1.0, name="arena-embedded-share")
    """the same for encoder outputs"""
    directory: str = field(default="/dev/shm", name="arena-directory")  # noqa: S108 - the file is created exclusively, mode 0600, under a random name
    """directory of the shared-memory file; must be a tmpfs"""

    keep: bool = field(default=False, name="keep-arena")
    """leave the arena's file when the store stops, for the next store with the same model and settings (`medialane
    doctor` lists such files)"""

    @property
    def shares(self) -> dict[EntryKind, float]:
        return {
            "encoded": self.encoded_share,
            "decoded": self.decoded_share,
            "processed": self.processed_share,
            "embedded": self.embedded_share,
        }

    def validate(self) -> None:
        """Raise StartupFailed if the arena cannot be created there.

        Files of dead owners count as free space: they are taken over, or removed before `Arena.create`.
        """
        if self.size_bytes < MIN_BYTES:
            raise StartupFailed(
                f"--arena-size is {format_bytes(self.size_bytes)}; the minimum is {format_bytes(MIN_BYTES)}"
            )
        for kind, share in self.shares.items():
            if not 0 <= share <= 1:
                raise StartupFailed(f"arena_{kind}_share must be between 0 and 1")
        try:
            found, file_system = os.statvfs(self.directory), file_system_type(self.directory)
        except OSError as error:
            raise StartupFailed(f"--arena-directory {self.directory} cannot be used: {error.strerror}") from error
        if file_system != _TMPFS:
            raise StartupFailed(
                f"--arena-directory {self.directory} is not on a tmpfs: media would be written to its disk; use "
                "/dev/shm, or mount a tmpfs there (mount -t tmpfs -o size=4g tmpfs DIRECTORY)"  # noqa: S108 - a text
            )
        free = found.f_bavail * found.f_frsize + reclaimable_bytes(self.directory)
        if free < self.size_bytes:
            raise StartupFailed(not_enough_space(self.size_bytes, self.directory, free))


def not_enough_space(size_bytes: int, directory: str, free_bytes: int) -> str:
    """Return the message for the operator if the arena does not fit."""
    shm_gib = math.ceil(size_bytes * 1.25 / GIB)
    return (
        f"the arena needs {format_bytes(size_bytes)} but {directory} has {format_bytes(free_bytes)} free: enlarge it "
        f"(docker run --shm-size={shm_gib}g, or --ipc=host) or make the arena smaller (--arena-size)"
    )
