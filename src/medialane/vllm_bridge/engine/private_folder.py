"""A private folder for the sockets of one engine, reaped after a kill.

vLLM creates its own sockets, and the file through which its processes meet, in the folder for temporary files, and
leaves those of killed processes there. `enter` makes it create them in ours instead, together with those of its KV
events. vLLM's processes inherit the variable, so it also shows which of them are ours (`is_entered`).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from medialane.runtime.private_files import OwnedFolder

_PREFIX = "medialane-vllm-"

#: The folder in which vLLM creates its sockets.
_VARIABLE = "VLLM_RPC_BASE_PATH"

#: sockaddr_un.sun_path has 108 bytes with its terminating zero (unix(7)); vLLM's sockets are named by a UUID.
_MAX_PARENT_BYTES = 107 - len(f"/{_PREFIX}12345678/") - 36


def is_entered() -> bool:
    """Return whether this process, or the one that started it, has entered a private folder."""
    return Path(os.environ.get(_VARIABLE, "")).name.startswith(_PREFIX)


class PrivateFolder:
    """An existing folder, mode 0700, in VLLM_RPC_BASE_PATH or else in the folder for temporary files; in /tmp if its
    path would be too long for sockets. Raises StartupFailed."""

    def __init__(self) -> None:
        self._outer = os.environ.get(_VARIABLE)
        parent = Path(self._outer or tempfile.gettempdir())
        if len(os.fsencode(parent)) > _MAX_PARENT_BYTES:
            parent = Path("/tmp")  # noqa: S108 - mkdtemp creates the folder exclusively and private
        self._folder = OwnedFolder.create(parent, _PREFIX)

    @property
    def path(self) -> Path:
        return self._folder.path

    def enter(self) -> None:
        """Make vLLM, in this process and its children, create its sockets in the folder, until `remove`."""
        os.environ[_VARIABLE] = str(self.path)

    def remove(self) -> None:
        """Restore the environment and delete the folder. Idempotent."""
        if os.environ.get(_VARIABLE) == str(self.path):
            del os.environ[_VARIABLE]
            if self._outer is not None:
                os.environ[_VARIABLE] = self._outer
        self._folder.close()
