"""What operators have changed in the list of workers, kept for all gateways of a port and for their next start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from medialane.core.errors import StartupFailed
from medialane.core.private_file import write_private
from medialane.core.process.owner_lock import locked


class ChangedWorkers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The addresses of workers that were added, by name, and the names of configured ones that were removed."""

    added: dict[str, str] = {}
    removed: list[str] = []

    def with_added(self, name: str, address: str, configured: Mapping[str, str]) -> ChangedWorkers:
        is_back = configured.get(name) == address
        added = self.added if is_back else {**self.added, name: address}
        return ChangedWorkers(added, [each for each in self.removed if each != name or not is_back])

    def with_removed(self, name: str, configured: Mapping[str, str]) -> ChangedWorkers:
        added = {each: address for each, address in self.added.items() if each != name}
        return ChangedWorkers(added, sorted({*self.removed, *({name} & configured.keys())}))

    def applied_to(self, configured: Mapping[str, str]) -> dict[str, str]:
        """Return the addresses of all workers by name."""
        kept = {name: address for name, address in configured.items() if name not in self.removed}
        return {**kept, **self.added}


class ChangedWorkersFile:
    """The file at `path`, which several gateways may write. Without a path, nothing outlives this process. Its methods
    block."""

    def __init__(self, path: str = "") -> None:
        self._path = Path(path) if path else None
        self._kept = ChangedWorkers()

    def read(self) -> ChangedWorkers:
        """Raises StartupFailed naming the setting."""
        if self._path is None:
            return self._kept
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=ChangedWorkers)
        except FileNotFoundError:
            return ChangedWorkers()
        except OSError as error:
            raise StartupFailed(f"--workers-file {self._path}: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise StartupFailed(f"--workers-file {self._path} was not written by a gateway: {error}") from error

    def change(self, change: Callable[[ChangedWorkers], ChangedWorkers]) -> None:
        """Replace what the file says by the result of `change`. Raises StartupFailed."""
        if self._path is None:
            self._kept = change(self._kept)
            return
        try:
            with locked(self._path.with_name(f"{self._path.name}.lock")):
                unfinished = self._path.with_name(f"{self._path.name}.new")
                write_private(unfinished, msgspec.json.encode(change(self.read())))
                unfinished.replace(self._path)
        except OSError as error:
            raise StartupFailed(f"--workers-file {self._path}: {error.strerror}") from error
