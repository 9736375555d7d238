"""What the worker did about the embedding of a media item, as far as its first output says."""

from __future__ import annotations

from typing import Literal

from medialane.core.feature import MediaSpan
from medialane.core.request import OutputDelta

#: `unneeded`: the item's tokens were in the KV cache. `loaded`: taken from the arena instead of encoding the item.
#: `encoded`: encoded, and kept for later requests. `unkept`: encoded, if it was not in the engine's encoder cache, and
#: not kept.
EmbeddingOutcome = Literal["unneeded", "loaded", "encoded", "unkept"]


def embedding_outcome(span: MediaSpan, first: OutputDelta) -> EmbeddingOutcome:
    if span.end <= (first.num_cached_tokens or 0):
        return "unneeded"
    if span.mm_hash in first.loaded:
        return "loaded"
    return "encoded" if span.mm_hash in first.embedded else "unkept"
