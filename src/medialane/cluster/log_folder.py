"""The folder of the logs of one run: chosen by the operator, or a private one that only failed runs leave behind."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from medialane.runtime.owner_lock import OwnedFolder, try_lock
from medialane.types.errors import StartupFailed

#: Folders of failed runs that are kept; older ones are removed when the next run starts.
NUM_KEPT = 5
_PREFIX = "medialane-logs-"
_LOCK = ".lock"


class LogFolder:
    """Files of a chosen folder are appended to and never removed."""

    def __init__(self, path: Path, owned: OwnedFolder | None = None, lock: int | None = None) -> None:
        self.path = path
        #: Whether `close` leaves the logs there: of a chosen folder always, of a private one if the run fails.
        self.keep = True
        self._owned = owned
        self._lock = lock

    @classmethod
    def create(cls, chosen: str, prefix: str = _PREFIX, *, shared: bool = False) -> LogFolder:
        """Use the folder `chosen`, without others unless it is `shared`; if empty, create a private one. Raises
        StartupFailed."""
        if not chosen:
            owned = OwnedFolder.create(Path(tempfile.gettempdir()), prefix, num_kept=NUM_KEPT)
            return cls(owned.path, owned)
        path = Path(chosen).expanduser().absolute()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = None if shared else os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupFailed(f"--log-dir {chosen}: {error.strerror}") from error
        if lock is not None and not try_lock(lock):
            os.close(lock)
            raise StartupFailed(f"--log-dir {chosen} is in use by another `medialane serve`: choose another folder")
        return cls(path, lock=lock)

    def close(self) -> None:
        """Remove a private folder whose logs are not to be kept. Idempotent."""
        if self._owned is not None:
            self._owned.close(keep=self.keep)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
