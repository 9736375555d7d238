"""Wire format of embeddings that a client sends instead of a media item (vLLM's `image_embeds` and the like)."""

from __future__ import annotations

import msgspec

from medialane.core.errors import InvalidFeature
from medialane.core.tensor import TensorSpec

#: `MediaPayload.media_type` and `EncodedMedia.media_type` of an `Embeds` document. Sniffing never returns it.
EMBEDS_TYPE = "application/x-medialane-embeds"

#: The field name of embeddings sent as one tensor instead of an object of named tensors.
UNNAMED = ""

#: Prefix of a document, so that its content hash differs from that of any media file.
_MAGIC = b"medialane-embeds-1\0"


class EmbedsTensor(msgspec.Struct, frozen=True):
    """One tensor by value: C-contiguous bytes, little-endian."""

    spec: TensorSpec
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != self.spec.nbytes:
            raise ValueError(f"{len(self.data)} bytes for a tensor {self.spec} of {self.spec.nbytes}")

    def __repr__(self) -> str:
        return f"EmbedsTensor({self.spec})"


class Embeds(msgspec.Struct, frozen=True):
    """One item's embeddings: tensors by name, or a single one under `UNNAMED`."""

    fields: dict[str, EmbedsTensor]


_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decode = msgspec.msgpack.Decoder(Embeds).decode


def encode_embeds(embeds: Embeds) -> bytes:
    """Encode `embeds` deterministically: equal embeddings give equal bytes."""
    return _MAGIC + _encode(embeds)


def decode_embeds(data: bytes | memoryview) -> Embeds:
    """Decode a document of `encode_embeds`. Raises InvalidFeature for any other bytes."""
    view = memoryview(data)
    if view[: len(_MAGIC)] != _MAGIC:
        raise InvalidFeature("unknown format of embeddings")
    try:
        return _decode(view[len(_MAGIC) :])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidFeature("malformed embeddings") from error
