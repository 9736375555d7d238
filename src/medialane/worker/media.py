"""The media of a request at the worker, held for as long as the engine reads them.

The arena of this host is an interface (`HostArena`), implemented by `store.StoreEntries`. `hold_entries` and `Receiver`
are the worker's ends of hand-over paths (the gateway's: `gateway.request.handover_paths`): what was sent becomes
readable bytes.

`HeldEmbeddings` are the embeddings of one request: the ones that its gateway has sent instead of tensors, and the ones
that the store has, or reserves memory for, when the worker asks it about items that came with tensors. One that is
loaded is held until the engine has released the request, which may load it again after preemption. The hold of one that
is written ends with the first output: the engine has encoded all items by then. At its end the store looks whether the
embedding is complete.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from medialane.arena import ArenaView
from medialane.arena.layout import is_completed, is_valid
from medialane.types.errors import HandoverFailed, MedialaneError, MediaLost, StoreUnavailable, Unavailable
from medialane.types.feature import (
    Embedding,
    EmbeddingUse,
    FoundEmbedding,
    Hold,
    LocalCopy,
    MediaPayload,
    MoverName,
    RemoteEntry,
    WantedEmbedding,
)
from medialane.types.request import EncoderCard, EngineRequest, OutputDelta, Prompt
from medialane.types.stats import StoreStats
from medialane.types.tensor import ArenaOffer, ArenaRange, InlineTensor, TensorDescriptor

logger = logging.getLogger(__name__)

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
    """Hold the entries that the request reads, after another host's were copied to the arena of this one. Those
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


#: How long the store may take to answer, besides waiting for another client that is encoding the item.
ANSWER_TIMEOUT_S = 1.0

#: No item takes longer to encode.
MAX_WAIT_S = 30.0


class HeldEmbeddings:
    """Created for each request with the engine's encoder at that time. The owner calls `release` once the engine has
    released the request."""

    def __init__(self, encoder: EncoderCard | None, host_arena: HostArena) -> None:
        self._encoder = encoder
        self._host_arena = host_arena
        self._held: dict[str, FoundEmbedding] = {}
        self._embeddings: dict[str, Embedding] = {}
        self._uses: dict[str, EmbeddingUse] = {}

    @property
    def ranges(self) -> list[ArenaRange]:
        """The entries that the engine loads or writes."""
        return [use.tensor.range for use in self._uses.values()]

    def check(self, media: Sequence[MediaPayload]) -> None:
        """Raise HandoverFailed if the encoder of this worker would not have computed one of the sent embeddings."""
        for item in media:
            if item.embedding is not None and not self._is_ours(item, item.embedding):
                raise HandoverFailed("an embedding is not one of this worker's encoder")

    async def find(self, request: EngineRequest, arena: str | None) -> EngineRequest:
        """Find the embeddings of items that came with tensors in `arena`, which the engine has mapped. If holds were
        passed with the request, they have been taken before.

        Returns the request without the tensors of items that the engine loads.
        """
        media, transfer = request.prompt.media, request.kv_transfer
        if transfer is not None and transfer.step == "receive":
            return request  # no item is encoded, unless the transfer fails
        sent = {item.mm_hash for item in media if item.embedding is not None}
        new = {item.mm_hash: item for item in media if item.mm_hash not in sent}
        wanted = [(item, one) for item in new.values() if (one := self._wanted(item)) is not None]
        if arena is None or not wanted:
            return request
        passed_with = request.request_id if request.has_passed_holds else None
        async with asyncio.TaskGroup() as tasks:
            for item, one in wanted:
                tasks.create_task(self._find(item, one, arena, passed_with))
        prompt = request.prompt.with_media(list(map(self._without_tensors, media)))
        return replace(request, prompt=prompt)

    def use_sent(self, media: Sequence[MediaPayload], arena: str | None, encoder: EncoderCard | None) -> None:
        """Have the engine load the embeddings that were sent, or copied from another host. Raises HandoverFailed if
        they are not in `arena`, which the engine has mapped.

        An administrative call may have replaced the encoder by `encoder` while embeddings were looked up: what that
        encodes is not kept under the earlier one's key. Raises HandoverFailed if an embedding of that is to be loaded.
        """
        for item in media:
            if item.embedding is None or item.mm_hash in self._held:
                continue
            if item.embedding.tensor.range.arena != arena:
                raise HandoverFailed("an embedding is in an arena that this worker's engine has not mapped")
            self._use(item.mm_hash, item.embedding, is_filled=True)
        if encoder != self._encoder:
            if any(use.is_filled for use in self._uses.values()):
                raise HandoverFailed("the worker's encoder has changed")
            self._uses.clear()

    def uses(self, media: Sequence[MediaPayload]) -> list[EmbeddingUse | None]:
        """Return what the engine does with the embedding of each item."""
        return [self._uses.get(item.mm_hash) for item in media]

    def on_first_output(self, delta: OutputDelta, is_complete: Callable[[ArenaRange], bool]) -> OutputDelta:
        """Return `delta` with the items whose embeddings are in the arena: nothing is written from now on."""
        if not self._uses:
            return delta  # what was found and is not used ends with the request
        loaded = [mm_hash for mm_hash, use in self._uses.items() if use.is_filled]
        written = [mm_hash for mm_hash, use in self._uses.items() if not use.is_filled]
        embedded = [*loaded, *(mm_hash for mm_hash in written if is_complete(self._uses[mm_hash].tensor.range))]
        return replace(delta, embedded=tuple(embedded), loaded=tuple(loaded))

    def end_writing(self) -> None:
        """Release what has been written, after the first output."""
        for mm_hash, use in self._uses.items():
            if not use.is_filled and (written := self._held.pop(mm_hash, None)) is not None:
                written.hold.release()

    def release(self) -> None:
        """End all holds. Idempotent."""
        while self._held:
            self._held.popitem()[1].hold.release()

    async def _find(self, item: MediaPayload, wanted: WantedEmbedding, arena: str, passed_with: str | None) -> None:
        """Without an answer the engine encodes the item, and the embedding is not kept."""
        wait_s = min(max(item.embedding_wait_ms / 1000, 0.0), MAX_WAIT_S)
        try:
            async with asyncio.timeout(wait_s + ANSWER_TIMEOUT_S):
                reply = await self._host_arena.embedding(wanted, wait_s=wait_s, passed_with=passed_with)
        except (MedialaneError, TimeoutError) as error:
            logger.warning("the embedding of an item is not kept: %s", error)
            return
        if reply is None:
            return
        self._held[item.mm_hash] = reply  # before anything can raise: `release` ends the hold
        if reply.embedding.tensor.range.arena == arena and reply.embedding.tensor.spec == wanted.spec:
            self._use(item.mm_hash, reply.embedding, is_filled=reply.is_filled)

    def _use(self, mm_hash: str, embedding: Embedding, *, is_filled: bool) -> None:
        self._embeddings[mm_hash] = embedding
        self._uses[mm_hash] = EmbeddingUse(embedding.tensor, is_filled)

    def _without_tensors(self, item: MediaPayload) -> MediaPayload:
        use = self._uses.get(item.mm_hash)
        if use is None or not use.is_filled:
            return item
        return replace(item, tensors=(), embedding=self._embeddings[item.mm_hash], remote=None)

    def _wanted(self, item: MediaPayload) -> WantedEmbedding | None:
        return None if self._encoder is None else self._encoder.wanted(item)

    def _is_ours(self, item: MediaPayload, sent: Embedding) -> bool:
        wanted = self._wanted(item)
        return wanted is not None and (sent.key, sent.tensor.spec) == (wanted.key, wanted.spec)
