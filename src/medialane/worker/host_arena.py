"""The arena of this host: the interface that the worker needs, implemented by `store.StoreEntries`.

The worker's ends of transfer paths (the gateway's: `gateway.request.transfer_paths`): what was sent becomes readable
bytes, held for as long as the engine reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from medialane.arena import ArenaView
from medialane.arena.layout import is_completed, is_valid
from medialane.types.errors import HandoverFailed, MediaLost, StoreUnavailable, Unavailable
from medialane.types.feature import (
    FoundEmbedding,
    Hold,
    LocalCopy,
    MediaPayload,
    MoverName,
    RemoteEntry,
    WantedEmbedding,
)
from medialane.types.request import EngineRequest, Prompt
from medialane.types.stats import StoreStats
from medialane.types.tensor import ArenaOffer, ArenaRange, InlineTensor, TensorDescriptor

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

    async def pull(self, entries: Sequence[RemoteEntry]) -> tuple[Hold, Sequence[LocalCopy]]:
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

    async def pull(self, entries: Sequence[RemoteEntry]) -> tuple[Hold, Sequence[LocalCopy]]:
        raise HandoverFailed(_NO_STORE)

    async def embedding(
        self, wanted: WantedEmbedding, *, wait_s: float, passed_with: str | None = None
    ) -> FoundEmbedding | None:
        return None


async def hold_entries(
    request: EngineRequest, held: Collection[ArenaRange], host_arena: HostArena
) -> tuple[EngineRequest, Hold | None, tuple[MoverName, ...]]:
    """Hold the entries that the request reads, after those of another host were copied to the arena of this one. Those
    in `held` are held already.

    Returns the request with the ranges of the copies, and what has copied them. Raises HandoverFailed.
    """
    media = request.prompt.media
    remote = {item.remote.range: item.remote for item in media if item.remote is not None}
    try:
        if remote:
            hold, copies = await host_arena.pull(list(remote.values()))
            moved = _moved(request, dict(zip(remote, (copy.range for copy in copies), strict=True)))
            return moved, hold, tuple(sorted({copy.mover for copy in copies if copy.mover is not None}))
        ranges = entries_read(request.prompt).difference(held)
        passed_with = request.request_id if request.has_passed_holds else None
        return request, await host_arena.hold(list(ranges), passed_with=passed_with) if ranges else None, ()
    except Unavailable as error:
        if isinstance(error, StoreUnavailable) and not remote:
            raise MediaLost(error.message) from error
        raise HandoverFailed(error.message) from error  # their gateway's store still has them


def entries_read(prompt: Prompt) -> set[ArenaRange]:
    """Return the entries of arenas that a request reads."""
    tensors = {t.range for item in prompt.media for t in item.tensors if isinstance(t, TensorDescriptor)}
    return tensors | {item.embedding.tensor.range for item in prompt.media if item.embedding is not None}


class Receiver:
    """Maps the arena of this host's store, read-only, and returns the bytes of tensors. The owner calls `close`."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._views: dict[str, ArenaView] = {}

    def attach(self, arena: str, nonce: bytes) -> bool:
        """Map the arena. True if it contains the nonce, which proves that it is the store's. Idempotent.

        A wrong nonce changes nothing: the mapping may be in use.
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
        return True

    def detach(self, arena: str) -> None:
        """Unmap the arena: no further descriptors of it are sent. Idempotent."""
        if (view := self._views.pop(arena, None)) is not None:
            view.close()

    def fetch(self, tensor: TensorDescriptor | InlineTensor) -> memoryview:
        """Return the tensor's bytes, valid until the request is released. Raises HandoverFailed."""
        if isinstance(tensor, InlineTensor):
            if len(tensor.data) != tensor.spec.nbytes:
                raise HandoverFailed("the bytes of an inline tensor are incomplete")
            return memoryview(tensor.data)
        view = self._views.get(tensor.range.arena)
        if view is None:
            raise MediaLost("the tensor is in an arena that this worker has not mapped")
        return view.tensor(tensor)

    def is_completed(self, entry: ArenaRange) -> bool:
        """Return whether another process has written the entry's payload (`arena.FillWriter`)."""
        view = self._views.get(entry.arena)
        return view is not None and is_valid(view.words, entry) and is_completed(view.words, entry)

    def close(self) -> None:
        """Unmap all arenas. Idempotent. Bytes that requests still hold stay readable until they release them."""
        for arena in list(self._views):
            self.detach(arena)


def _moved(request: EngineRequest, copies: Mapping[ArenaRange, ArenaRange]) -> EngineRequest:
    """Return the request with the tensors and embeddings of entries that have been copied."""

    def copy_of(tensor: TensorDescriptor) -> TensorDescriptor:
        return replace(tensor, range=copies.get(tensor.range, tensor.range))

    def moved(item: MediaPayload) -> MediaPayload:
        tensors = tuple(copy_of(t) if isinstance(t, TensorDescriptor) else t for t in item.tensors)
        embedding = item.embedding and replace(item.embedding, tensor=copy_of(item.embedding.tensor))
        return replace(item, tensors=tensors, embedding=embedding, remote=None)

    return replace(request, prompt=request.prompt.with_media(list(map(moved, request.prompt.media))))
