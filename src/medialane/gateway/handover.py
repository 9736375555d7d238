"""Builds the prompt in the form that a transfer path sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from medialane.core.errors import HandoverFailed, StoreUnavailable
from medialane.core.feature import (
    Feature,
    MediaPayload,
    PlacedFeature,
    PlaceholderRange,
    PreparedPrompt,
    StagedItem,
    WantedEmbedding,
)
from medialane.core.remote_entry import MoverChoice, RemoteEntry
from medialane.core.request import EncoderCard, ExpandedPrompt, Prompt, SourcePrompt
from medialane.core.stage import STAGES
from medialane.core.tensor import ArenaRange, TensorDescriptor, TransferTensors
from medialane.gateway.transports import TransferPath, Transport
from medialane.observability.timeline import StageTimeline


class Grants(Protocol):
    """Lets other hosts copy entries; implemented by `store.StoreGrants`."""

    async def grant(self, ranges: Sequence[ArenaRange]) -> Sequence[RemoteEntry]:
        """Return the right to copy each of these entries, which the caller holds until they are copied.

        Raises HandoverFailed, StoreUnavailable.
        """
        ...


class PassesHolds(Protocol):
    """Passes holds on entries to workers of this host; implemented by `store.HoldPasser`."""

    def pass_on(
        self, ranges: Sequence[ArenaRange], *, to: str, request_id: str, wanted: Sequence[WantedEmbedding] = ()
    ) -> bool:
        """Have the store's client `to` hold entries, which the caller holds, and find or write embeddings. Return False
        if none is passed."""
        ...


class Handover:
    """Builds the prompt that is sent. `holds` are for the transport `shm`, `grants` for `pull`; `mover` is the choice
    of a mover. `encoder_ms_per_token` is the expected time of encoding one embedding: a worker waits as long for
    another one that is encoding the same item."""

    def __init__(
        self,
        *,
        transports: Sequence[Transport],
        max_inline_bytes: int,
        holds: PassesHolds | None = None,
        grants: Grants | None = None,
        mover: MoverChoice = "auto",
        encoder_ms_per_token: float = 0.0,
    ) -> None:
        self._holds = holds
        self._grants = grants
        self._mover = mover
        self._encoder_ms_per_token = encoder_ms_per_token
        self._transports = {t.name: t for t in transports}
        self._max_inline_bytes = max_inline_bytes

    async def prompt(
        self, transfer_path: TransferPath, token_ids: list[int], prepared: PreparedPrompt, timeline: StageTimeline
    ) -> Prompt:
        """Return the prompt in the form for `transfer_path`. The request's scope holds the media that it refers to.

        `token_ids` are the prompt's as vLLM's app passed them. Raises HandoverFailed, and what preparing the media for
        the path's stage raises.
        """
        is_processed = STAGES[transfer_path.stage].is_processed
        if not is_processed:
            token_ids = _unexpanded(token_ids, prepared)
        items = await prepared.media.in_stage(transfer_path.stage)
        if transfer_path.transport == "inline" and any(item.feature.embedding is not None for item in items):
            raise HandoverFailed("embeddings are not sent in messages")
        published = self._publish(transfer_path, [item.feature.tensors for item in items], timeline)
        options = prepared.source.options
        if is_processed:
            places = [placed.placeholder for placed in prepared.features]
            payloads = list(map(self._feature, [item.feature for item in items], places, published))
        else:
            payloads = list(map(_source, items, published))
        if transfer_path.transport == "pull":
            payloads = await self._granted(payloads)
        if is_processed:
            return ExpandedPrompt(token_ids, tuple(payloads), options, prepared.encoder_token_ids)
        encoder_token_ids = None if prepared.encoder_token_ids is None else prepared.source.token_ids
        return SourcePrompt(token_ids, tuple(payloads), options, transfer_path.stage, encoder_token_ids)

    def features_prompt(self, token_ids: list[int], items: Sequence[PlacedFeature], options: bytes) -> ExpandedPrompt:
        """Return a prompt with features of the arena, for a worker that has mapped it. The caller holds them."""
        payloads = [self._feature(item.feature, item.placeholder, item.feature.tensors) for item in items]
        return ExpandedPrompt(token_ids, tuple(payloads), options)

    def pass_holds(self, prompt: Prompt, *, to: str, request_id: str, encoder: EncoderCard | None = None) -> bool:
        """Pass holds on what the prompt refers to, to the worker that is about to get it, and on the embeddings of new
        items if that has an `encoder`. Return whether it is to wait for them."""
        ranges = list(dict.fromkeys(payload.entry for payload in prompt.media if payload.entry is not None))
        if not ranges or self._holds is None:
            return False
        new = {payload.mm_hash: payload for payload in prompt.media if payload.embedding is None}
        wanted = [found for payload in new.values() if encoder and (found := encoder.wanted(payload)) is not None]
        return self._holds.pass_on(ranges, to=to, request_id=request_id, wanted=wanted)

    async def _granted(self, payloads: Sequence[MediaPayload]) -> list[MediaPayload]:
        """Return the payloads with the right to copy their entries. Raises HandoverFailed.

        An item without large tensors needs none.
        """
        ranges = list(dict.fromkeys(payload.entry for payload in payloads if payload.entry is not None))
        if self._grants is None:
            raise HandoverFailed("there is no store to copy from")
        try:
            granted = await self._grants.grant(ranges)
        except StoreUnavailable as error:
            raise HandoverFailed(error.message) from error
        remote = {entry.range: replace(entry, mover=self._mover) for entry in granted}
        return [
            payload if payload.entry is None else replace(payload, remote=remote[payload.entry]) for payload in payloads
        ]

    def _feature(self, feature: Feature, place: PlaceholderRange, tensors: TransferTensors) -> MediaPayload:
        """Return a feature with its position in the expanded prompt."""
        return MediaPayload(
            feature.modality,
            feature.mm_hash,
            feature.header,
            tensors,
            feature.size,
            place,
            embedding=feature.embedding,
            embedding_wait_ms=0.0 if feature.embedding is not None else self._encoder_ms_per_token * place.num_embeds,
        )

    def _publish(
        self, transfer_path: TransferPath, tensors: Sequence[tuple[TensorDescriptor, ...]], timeline: StageTimeline
    ) -> list[TransferTensors]:
        """Return the tensors of every item in the form that the transport sends. Raises HandoverFailed."""
        if transfer_path.transport == "inline":
            total = sum(t.spec.nbytes for item in tensors for t in item)
            if total > self._max_inline_bytes:
                raise HandoverFailed(
                    f"{total} bytes of media exceed the limit of {self._max_inline_bytes} bytes in a message"
                )
            timeline.copied_bytes += total
        return [self._transports[transfer_path.transport].publish(item) for item in tensors]


def _source(item: StagedItem, tensors: TransferTensors) -> MediaPayload:
    """Return an item that the worker processes itself."""
    return MediaPayload(
        item.feature.modality,
        item.feature.mm_hash,
        b"",
        tensors,
        item.feature.size,
        media_type=item.media_type,
        io=item.ref.io,
        param=item.ref.param,
    )


def _unexpanded(token_ids: list[int], prepared: PreparedPrompt) -> list[int]:
    """Return `token_ids` with unexpanded placeholders, plus the tokens that vLLM's beam search has appended.

    Raises HandoverFailed for what cannot be sent to a worker that expands the prompt: per-item options and truncated
    prompts.
    """
    if any(ref.options != b"{}" for ref in prepared.source.items):
        raise HandoverFailed("a worker processes all items of a request with the same options")
    if not prepared.features or prepared.encoder_token_ids is not None:  # the decoder's prompt has no placeholders
        return token_ids
    num_expanded = len(prepared.token_ids)
    if token_ids[:num_expanded] != prepared.token_ids:
        raise HandoverFailed("a truncated prompt cannot be expanded by a worker")
    return [*prepared.source.token_ids, *token_ids[num_expanded:]]
