"""Features: what vLLM's multimodal processor makes of one media item, and where it stands in a prompt."""

from __future__ import annotations

import msgspec

from medialane.core.media import MediaSize, Modality
from medialane.core.tensor import InlineTensor, TensorDescriptor


class Feature(msgspec.Struct, frozen=True):
    """The processed tensors of one media item.

    `mm_hash` identifies it (64 hex digits: blake3-256 over model, processor settings, content, options and salt).
    `header` is what the engine's bridge needs besides the tensors (field names and kinds, small tensors); only the
    bridge reads it. `tensors` are the large ones, in the header's order.
    """

    modality: Modality
    mm_hash: str
    header: bytes
    tensors: tuple[TensorDescriptor, ...]
    size: MediaSize

    @property
    def nbytes(self) -> int:
        return sum(t.spec.nbytes for t in self.tensors)

    def __repr__(self) -> str:
        return f"Feature({self.modality}, {self.mm_hash[:12]}, {[t.spec for t in self.tensors]}, {self.size})"


class PlaceholderRange(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens [offset, offset + length) of the prompt stand for one item.

    `is_embed`, if given, has one byte a token (0 or 1): only the ones take an embedding.
    """

    offset: int
    length: int
    is_embed: bytes | None = None

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length <= 0:
            raise ValueError(f"placeholder [{self.offset}, +{self.length}) is empty or before the prompt")
        if self.is_embed is not None and len(self.is_embed) != self.length:
            raise ValueError(f"is_embed has {len(self.is_embed)} marks for {self.length} tokens")

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        return self.length if self.is_embed is None else self.length - self.is_embed.count(0)


class PlacedFeature(msgspec.Struct, frozen=True):
    """A feature and its place in one prompt."""

    feature: Feature
    placeholder: PlaceholderRange


class PreparedPrompt(msgspec.Struct, frozen=True):
    """A prompt whose placeholders are expanded, with its features in prompt order."""

    token_ids: list[int]
    features: tuple[PlacedFeature, ...]

    def __repr__(self) -> str:
        return f"PreparedPrompt({len(self.token_ids)} tokens, {len(self.features)} features)"


class HandedFeature(msgspec.Struct, frozen=True):
    """A placed feature as it travels to a worker: its tensors by descriptor or by value, header and size unchanged."""

    modality: Modality
    mm_hash: str
    header: bytes
    tensors: tuple[TensorDescriptor | InlineTensor, ...]
    size: MediaSize
    placeholder: PlaceholderRange
