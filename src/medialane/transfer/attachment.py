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
        """Map the arena. True if the nonce stands in it: the gateway's shared memory is ours. Idempotent.

        A wrong nonce changes nothing: another gateway may have the arena mapped.
        """
        if (view := self._views.get(arena)) is not None:
            return view.nonce == nonce
        try:
            view = ArenaView.open(arena, self._directory)
        except HandoverFailed:
            return False
        if view.nonce != nonce:
            view.close()
            return False
        self._views[arena] = view
        self.receiver.add(arena, view)
        return True

    def detach(self, arena: str) -> None:
        """Unmap the arena: its gateway hands nothing over any more. Idempotent."""
        if (view := self._views.get(arena)) is not None:
            self._detach(view)

    def close(self) -> None:
        """Unmap all. Idempotent. Bytes that requests still hold stay readable until they let go of them."""
        for view in list(self._views.values()):
            self._detach(view)

    def _detach(self, view: ArenaView) -> None:
        del self._views[view.id]
        self.receiver.remove(view.id)
        view.close()
