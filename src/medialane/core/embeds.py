"""Embeddings that a client sends in place of a media item (vLLM's `image_embeds` and the like), as they travel."""

from __future__ import annotations

import msgspec

from medialane.core.errors import InvalidFeature
from medialane.core.tensor import TensorSpec

#: What `MediaPayload.media_type` and `EncodedMedia.media_type` say of an `Embeds` document. No sniffer ever says it.
EMBEDS_TYPE = "application/x-medialane-embeds"

#: The field of embeddings that came as one tensor instead of an object of named ones.
UNNAMED = ""

#: Stands before a document, so that its content hash is no media's.
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
    """One item's embeddings: tensors by name, or one under `UNNAMED`."""

    fields: dict[str, EmbedsTensor]


_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decode = msgspec.msgpack.Decoder(Embeds).decode


def encode_embeds(embeds: Embeds) -> bytes:
    """The document of `embeds`; equal embeddings are equal bytes."""
    return _MAGIC + _encode(embeds)


def decode_embeds(data: bytes | memoryview) -> Embeds:
    """Raises InvalidFeature for what is no document of ours."""
    view = memoryview(data)
    if view[: len(_MAGIC)] != _MAGIC:
        raise InvalidFeature("embeddings of an unknown form")
    try:
        return _decode(view[len(_MAGIC) :])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidFeature("embeddings that cannot be read") from error
