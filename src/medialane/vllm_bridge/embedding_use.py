"""Validates the embeddings of a request before EngineCore, where a wrong one would end the engine."""

from __future__ import annotations

from collections.abc import Container, Sequence

import msgspec

from medialane.core.errors import HandoverFailed
from medialane.core.feature import EmbeddingUse, MediaPayload
from medialane.core.request import EncoderCard
from medialane.core.tensor import TensorSpec
from medialane.vllm_bridge.embedding_schedule import RequestEmbeddings
from medialane.vllm_bridge.validation import placeholder_of

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

    Raises HandoverFailed for one that is not an output of this engine's encoder for its item, or is not in an arena
    that the engine has mapped: the request can be sent with the items' tensors instead. InvalidFeature for an item
    without a placeholder.
    """
    found = RequestEmbeddings(request_id, {}, {})
    for feature, use in zip(features, uses, strict=True):
        if use is not None:
            _check(feature, use, encoder, arenas)
            (found.loads if use.is_filled else found.fills)[feature.mm_hash] = use.tensor
    for mm_hash in found.loads:  # of two equal items, one may have been encoded meanwhile
        found.fills.pop(mm_hash, None)
    return _ENCODER.encode(found) if found.loads or found.fills else None


def _check(feature: MediaPayload, use: EmbeddingUse, encoder: EncoderCard | None, arenas: Container[str]) -> None:
    if encoder is None:
        raise HandoverFailed("this engine does not load embeddings")
    width = encoder.widths.get(feature.modality)
    if width is None:
        raise HandoverFailed(f"this engine does not load embeddings of {feature.modality}")
    expected = TensorSpec(encoder.dtype, (placeholder_of(feature).num_embeds, width))
    if use.tensor.spec != expected:
        raise HandoverFailed(f"{feature.modality}: the embedding is {use.tensor.spec} instead of {expected}")
    if use.tensor.range.arena not in arenas:
        raise HandoverFailed("the engine has not mapped the arena of the embedding")
