"""The arena of this host: the interface that the worker needs, implemented by `store.StoreEntries`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from medialane.types.errors import HandoverFailed
from medialane.types.feature import Copied, FoundEmbedding, Hold, RemoteEntry, WantedEmbedding
from medialane.types.stats import StoreStats
from medialane.types.tensor import ArenaOffer, ArenaRange

_NO_STORE = "this worker has no store on its host"


class HostArena(Protocol):
    def watch(self, listener: Callable[[ArenaOffer | None], None]) -> None:
        """Call `listener` with the arena of this host's store when there is one, and with None when it is gone: a store
        that is lost may be followed by one with the same arena. Called on the event loop; must not block."""
        ...

    @property
    def client_id(self) -> str:
        """This worker's name at the store; empty without a store."""
        ...

    async def exposed_stats(self) -> StoreStats | None:
        """Return the state of this host's store, as of now, if this process is to expose it for scrapers; None if
        another one does, or there is no store."""
        ...

    async def hold(self, ranges: Sequence[ArenaRange], *, passed_with: str | None = None) -> Hold:
        """Hold entries until the result is released. `passed_with` is the id of the request if its gateway has passed
        holds: embeddings among them are then found by `embedding`. Raises HandoverFailed if an entry is not held by the
        gateway any more, StoreUnavailable if the store is lost and does not come back with its arena."""
        ...

    async def pull(self, entries: Sequence[RemoteEntry]) -> tuple[Hold, Sequence[Copied]]:
        """Have the store copy entries of another host's store, unless it has them; hold the copies until the result is
        released, and return them. Raises MedialaneError."""
        ...

    async def embedding(
        self, wanted: WantedEmbedding, *, wait_s: float, passed_with: str | None = None
    ) -> FoundEmbedding | None:
        """Find an embedding, or reserve memory for it. None if another client is writing it and does not finish within
        `wait_s`, or if there is no memory; the caller encodes the item then. `passed_with` as for `hold`, which the
        caller has called before. Raises StoreUnavailable."""
        ...


class NoArena:
    """For a worker without a store on its host: media arrive in messages."""

    client_id = ""

    def watch(self, listener: Callable[[ArenaOffer | None], None]) -> None:
        """There is nothing to watch."""

    async def exposed_stats(self) -> StoreStats | None:
        return None

    async def hold(self, ranges: Sequence[ArenaRange], *, passed_with: str | None = None) -> Hold:
        raise HandoverFailed(_NO_STORE)

    async def pull(self, entries: Sequence[RemoteEntry]) -> tuple[Hold, Sequence[Copied]]:
        raise HandoverFailed(_NO_STORE)

    async def embedding(
        self, wanted: WantedEmbedding, *, wait_s: float, passed_with: str | None = None
    ) -> FoundEmbedding | None:
        return None
