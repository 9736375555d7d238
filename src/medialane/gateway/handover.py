"""Builds the prompt in the form that a transfer path sends."""

from __future__ import annotations

from medialane.gateway.transports import TransferPath
from medialane.observability.timeline import StageTimeline
from medialane.types.errors import HandoverFailed
from medialane.types.feature import MediaPayload, PlacedFeature, PreparedPrompt, StagedItem
from medialane.types.request import ExpandedPrompt, Prompt, SourcePrompt


async def prompt_for(
    path: TransferPath,
    token_ids: list[int],
    prepared: PreparedPrompt,
    timeline: StageTimeline,
    *,
    encoder_ms_per_token: float = 0.0,
) -> Prompt:
    """Return the prompt in the form for `path`. The request's scope holds the media that it refers to.

    `token_ids` are the prompt's as vLLM's app passed them, `encoder_ms_per_token` as for `feature_payload`. Raises
    HandoverFailed, and what preparing the media for the path's stage raises.
    """
    stage, source = path.stage, prepared.source
    if not stage.is_processed:
        token_ids = _unexpanded(token_ids, prepared)
    items = await prepared.media.in_stage(stage.name)
    if stage.is_processed:
        placed = (PlacedFeature(i.feature, p.placeholder) for i, p in zip(items, prepared.features, strict=True))
        payloads = [feature_payload(each, encoder_ms_per_token) for each in placed]
        sent = await path.transport.publish(payloads, timeline)
        return ExpandedPrompt(token_ids, tuple(sent), source.options, prepared.encoder_token_ids)
    sent = await path.transport.publish(list(map(_source_payload, items)), timeline)
    encoder_token_ids = None if prepared.encoder_token_ids is None else source.token_ids
    return SourcePrompt(token_ids, tuple(sent), source.options, stage.name, encoder_token_ids)


def feature_payload(placed: PlacedFeature, encoder_ms_per_token: float) -> MediaPayload:
    """Return a feature with its position in the expanded prompt. `encoder_ms_per_token` is the expected time of
    encoding one embedding: a worker waits as long for another one that is encoding the same item."""
    feature, place = placed.feature, placed.placeholder
    return MediaPayload(
        feature.modality,
        feature.mm_hash,
        feature.header,
        feature.tensors,
        feature.size,
        place,
        embedding=feature.embedding,
        embedding_wait_ms=0.0 if feature.embedding is not None else encoder_ms_per_token * place.num_embeds,
    )


def _source_payload(item: StagedItem) -> MediaPayload:
    """Return an item that the worker processes itself."""
    feature = item.feature
    return MediaPayload(
        feature.modality,
        feature.mm_hash,
        b"",
        feature.tensors,
        feature.size,
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
