"""Validates the embeddings of a request before EngineCore, where a wrong one would end the engine."""

from __future__ import annotations

from collections.abc import Container, Sequence

import msgspec

from medialane.core.errors import HandoverFailed
from medialane.core.feature import EmbeddingUse, MediaPayload
from medialane.core.request import EncoderCard
from medialane.core.tensor import TensorSpec
from medialane.vllm_bridge.encoder_cache.embedding_schedule import EmbeddingPlan
from medialane.vllm_bridge.items.validation import placeholder_of

_ENCODER = msgspec.msgpack.Encoder()


def request_embeddings(
    request_id: str,
    features: Sequence[MediaPayload],
    uses: Sequence[EmbeddingUse | None],
    *,
    encoder: EncoderCard | None,
    arenas: Container[str],
) -> bytes | None:
    """Return the embeddings of a request as EngineCore gets them; None if it has none.

    One to be loaded must be an output of this engine's encoder for its item, in an arena that the engine has mapped.
    Otherwise raises HandoverFailed: the request can be sent with the item's tensors instead. One to be saved under
    those conditions is left out. Raises InvalidFeature for an item without a placeholder.
    """
    found = EmbeddingPlan(request_id, {}, {})
    for feature, use in zip(features, uses, strict=True):
        fault = "" if use is None else _fault(feature, use, encoder, arenas)
        if use is not None and use.is_filled:
            if fault:
                raise HandoverFailed(f"{feature.modality}: {fault}")
            found.loads[feature.mm_hash] = use.tensor
        elif use is not None and not fault:
            found.fills[feature.mm_hash] = use.tensor
    for mm_hash in found.loads:  # of two equal items, one may have been encoded meanwhile
        found.fills.pop(mm_hash, None)
    return _ENCODER.encode(found) if found.loads or found.fills else None


def _fault(feature: MediaPayload, use: EmbeddingUse, encoder: EncoderCard | None, arenas: Container[str]) -> str:
    """Return why the engine does not load such an embedding; empty if it does."""
    width = None if encoder is None else encoder.widths.get(feature.modality)
    if encoder is None or width is None:
        return "this engine does not load embeddings"
    expected = TensorSpec(encoder.dtype, (placeholder_of(feature).num_embeds, width))
    if use.tensor.spec != expected:
        return f"the embedding is {use.tensor.spec} instead of {expected}"
    return "" if use.tensor.range.arena in arenas else "the engine has not mapped the arena of the embedding"
