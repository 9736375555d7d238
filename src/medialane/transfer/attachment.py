"""A worker's mappings of the arenas of its gateways."""

from __future__ import annotations

from medialane.arena import ArenaView
from medialane.core.errors import HandoverFailed
from medialane.transfer.shm import ShmReceiver


class AttachedArenas:
    """Maps arenas read-only and lets a `ShmReceiver` read from them. The owner calls `close`."""

    def __init__(self, directory: str) -> None:
        self.receiver = ShmReceiver()
        self._directory = directory
        self._views: dict[str, ArenaView] = {}

    def attach(self, arena: str, nonce: bytes) -> bool:
        """Map the arena. True if the nonce stands in it: the gateway's shared memory is ours. Idempotent."""
        view = self._views.get(arena)
        if view is None:
            try:
                view = ArenaView.open(arena, self._directory)
            except HandoverFailed:
                return False
            self._views[arena] = view
            self.receiver.add(arena, view)
        if view.nonce == nonce:
            return True
        self._detach(view)
        return False

    def forget_gone(self) -> int:
        """Unmap arenas whose file is gone: nobody will hand over from there again. Return how many there were."""
        gone = [view for view in self._views.values() if not view.exists(self._directory)]
        for view in gone:
            self._detach(view)
        return len(gone)

    def close(self) -> None:
        """Unmap all. Idempotent. Bytes that requests still hold stay readable until they let go of them."""
        for view in list(self._views.values()):
            self._detach(view)

    def _detach(self, view: ArenaView) -> None:
        del self._views[view.id]
        self.receiver.remove(view.id)
        view.close()
