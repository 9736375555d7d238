"""The embeddings of one request's media: those that its gateway has sent instead of tensors, and those that the store
has, or reserves memory for, when the worker asks it about items that came with tensors.

An embedding that is loaded is held until the engine has released the request, which may load it again after preemption.
The hold of one that is written ends with the first output: the engine has encoded all items by then. At its end the
store looks whether the embedding is complete.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from medialane.types.errors import HandoverFailed, MedialaneError
from medialane.types.feature import Embedding, EmbeddingUse, FoundEmbedding, MediaPayload, WantedEmbedding
from medialane.types.request import EncoderCard, EngineRequest, OutputDelta
from medialane.types.tensor import ArenaRange
from medialane.worker.host_arena import HostArena

logger = logging.getLogger(__name__)

#: How long the store may take to answer, besides waiting for another client that is encoding the item.
ANSWER_TIMEOUT_S = 1.0

#: No item takes longer to encode.
MAX_WAIT_S = 30.0


class HeldEmbeddings:
    """Created for each request with the engine's encoder at that time. The owner calls `release` once the engine has
    released the request."""

    def __init__(
        self, encoder: EncoderCard | None, host_arena: HostArena, *, answer_timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self._answer_timeout_s = answer_timeout_s
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
        media = request.prompt.media
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
        return msgspec.structs.replace(request, prompt=prompt)

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
        return msgspec.structs.replace(delta, embedded=tuple(embedded), loaded=tuple(loaded))

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
            async with asyncio.timeout(wait_s + self._answer_timeout_s):
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
        return msgspec.structs.replace(item, tensors=(), embedding=self._embeddings[item.mm_hash], remote=None)

    def _wanted(self, item: MediaPayload) -> WantedEmbedding | None:
        return None if self._encoder is None else self._encoder.wanted(item)

    def _is_ours(self, item: MediaPayload, sent: Embedding) -> bool:
        wanted = self._wanted(item)
        return wanted is not None and (sent.key, sent.tensor.spec) == (wanted.key, wanted.spec)
