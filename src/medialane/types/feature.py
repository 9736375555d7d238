"""Features: the output of vLLM's multimodal processor for one media item, with the fields of its header, and its
placeholder in a prompt; entries of other hosts' arenas."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec

from medialane.types.media import MediaRef, MediaSize, Modality, StageName
from medialane.types.tensor import (
    ArenaRange,
    InlineTensor,
    SentTensors,
    TensorDescriptor,
    TensorDescriptors,
    TensorSpec,
)

#: The kind of an arena entry: encoded bytes as received, decoded media, processed features, outputs of the encoder.
EntryKind = Literal["encoded", "decoded", "processed", "embedded"]

#: What copies an entry from one store's arena to another's.
MoverName = Literal["nixl", "tcp"]

MoverChoice = Literal["auto", MoverName]


class LocalCopy(NamedTuple):
    """The copy of another host's entry in this host's arena; `mover` is what has copied it, None if that is not known
    any more."""

    range: ArenaRange
    mover: MoverName | None


class RemoteEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The right to copy one entry of a store's arena, given by that store to a client that holds the entry.

    `range` is in the arena of the source, which is cached there under `kind` and `key`: equal keys mean equal content
    on every host. `address` is the source's peer listener. `capability` is checked by the source alone: its
    HMAC over range, kind, key and `expires_ms`, a time of the source's own monotonic clock, so that clocks of hosts are
    never compared. `mover` is the operator's choice.
    """

    range: ArenaRange
    kind: EntryKind
    key: str
    address: str
    expires_ms: int
    capability: bytes
    mover: MoverChoice = "auto"

    def __repr__(self) -> str:
        return f"RemoteEntry({self.kind} {self.key[:12]}, {self.range.nbytes} bytes at {self.address})"


#: Limit of a feature's header, in bytes. It is sent in control messages (to other processes and to workers); both ends
#: check it.
MAX_HEADER_BYTES = 4 * 1024 * 1024

Header = Annotated[bytes, msgspec.Meta(max_length=MAX_HEADER_BYTES)]


class SmallTensor(msgspec.Struct, frozen=True, tag="small"):
    spec: TensorSpec
    data: bytes


class LargeTensor(msgspec.Struct, frozen=True, tag="large"):
    index: int
    spec: TensorSpec


class Scalar(msgspec.Struct, frozen=True, tag="scalar"):
    value: bool | int | float | str | None


class Nested(msgspec.Struct, frozen=True, tag="nested"):
    items: list[SmallTensor | LargeTensor | Scalar | Nested]


Value = SmallTensor | LargeTensor | Scalar | Nested

Slice = tuple[int | None, int | None, int | None]


class Batched(msgspec.Struct, frozen=True, tag="batched"):
    keep_on_cpu: bool = False


class Flat(msgspec.Struct, frozen=True, tag="flat"):
    slices: list[list[Slice]]
    nested: bool
    dim: int = 0
    keep_on_cpu: bool = False


class Shared(msgspec.Struct, frozen=True, tag="shared"):
    batch_size: int
    keep_on_cpu: bool = False


class Field(msgspec.Struct, frozen=True):
    name: str
    kind: Batched | Flat | Shared
    value: Value


class HeaderFields(msgspec.Struct, frozen=True):
    """What the bytes of a `Header` hold: the fields of a processed item, without its large tensors
    (`vllm_bridge.items.features`)."""

    fields: list[Field]


class Embedding(msgspec.Struct, frozen=True):
    """The output of the model's encoder for one media item, in an arena.

    `key` is its key there (`hashing.embedding_key`). `tensor` has one row per embedding of the item, in the encoder's
    output width and dtype.
    """

    key: str
    tensor: TensorDescriptor


class EmbeddingUse(NamedTuple):
    """What the engine does with the embedding of an item: load it, or, if not `is_filled`, write it there if it encodes
    the item."""

    tensor: TensorDescriptor
    is_filled: bool


class Feature(msgspec.Struct, frozen=True, omit_defaults=True):
    """The processed tensors of one media item, or the single tensor of another stage: decoded media or encoded bytes.

    `mm_hash` identifies it (64 hex digits: blake3-256 over model, processor settings, content, options and salt; the
    decoded form has its own key in the arena). `header` is opaque except to the engine's bridge: field names and kinds,
    small tensors. `tensors` are the large ones, in the header's order; there are none if there is an `embedding`, with
    which the engine does not need them.
    """

    modality: Modality
    mm_hash: str
    header: Header
    tensors: TensorDescriptors
    size: MediaSize
    embedding: Embedding | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of what is handed over to a worker: its large tensors, or its embedding."""
        if self.embedding is not None:
            return self.embedding.tensor.spec.nbytes
        return sum(t.spec.nbytes for t in self.tensors)

    @property
    def entry(self) -> ArenaRange | None:
        """The arena entry of its tensors, which are all in the same, or of its embedding."""
        return _entry(self.tensors, self.embedding)

    def __repr__(self) -> str:
        return f"Feature({self.modality}, {self.mm_hash[:12]}, {[t.spec for t in self.tensors]}, {self.size})"


class PlaceholderRange(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens [offset, offset + length) of the prompt represent one item.

    `is_embed`, if given, has one byte per token (0 or 1): only tokens with 1 are replaced by an embedding.
    """

    offset: int
    length: int
    is_embed: bytes | None = None

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length <= 0:
            raise ValueError(f"placeholder [{self.offset}, +{self.length}) is empty or before the prompt")
        if self.is_embed is not None and len(self.is_embed) != self.length:
            raise ValueError(f"is_embed has {len(self.is_embed)} bytes for {self.length} tokens")

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        return self.length if self.is_embed is None else self.length - self.is_embed.count(0)


class PlacedFeature(msgspec.Struct, frozen=True):
    """A feature and its placeholder in one prompt."""

    feature: Feature
    placeholder: PlaceholderRange


class MediaSpan(msgspec.Struct, frozen=True):
    """Position of a media item in a prompt: tokens [offset, offset + length).

    `num_embeds` is the number of embeddings that the encoder computes for it (its tokens minus separators).
    `embedding_bytes` is their size if they are in the arena of the gateway's host: no worker need encode the item.
    """

    mm_hash: str
    offset: int
    length: int
    modality: str = ""
    num_embeds: int = 0
    embedding_bytes: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.length


class MediaPrompt(msgspec.Struct, frozen=True):
    """A prompt as rendered by the chat template: each item is one unexpanded placeholder.

    `items` are in the order of the placeholders of their modality; `options` are the request's processor options,
    canonical JSON. With `is_encoder_prompt` the model has an encoder and a decoder, and this is the encoder's prompt.
    `hash_factors` are opaque except to a `MediaHasher`.
    """

    token_ids: list[int]
    items: tuple[MediaRef, ...]
    options: bytes = b"{}"
    is_encoder_prompt: bool = False
    hash_factors: bytes = b"{}"

    @property
    def has_embeds(self) -> bool:
        return any(ref.is_embeds for ref in self.items)

    def __repr__(self) -> str:
        return f"MediaPrompt({len(self.token_ids)} tokens, {self.items})"


class Hold(Protocol):
    """A claim on an entry of the arena, in the store an `arena.Pin`, at its clients a `StoreHold`: the bytes stay in
    place until `release`, called exactly once."""

    def release(self) -> None: ...


class FoundEmbedding(NamedTuple):
    """An item's embedding in the arena of this host. If not `is_filled`, the engine is to write it there.

    Releasing `hold` ends the reading, or the writing: then what has been written is cached, and anything else freed.
    """

    embedding: Embedding
    hold: Hold
    is_filled: bool


class WantedEmbedding(NamedTuple):
    """The embedding `key` of the item that `feature` describes, without tensors: a tensor of `spec`."""

    key: str
    feature: Feature
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class StagedItem:
    """One media item in the form that a stage sends, and the request's hold on it (None if nothing is in the arena).

    `feature.mm_hash` is the item's identifier in the engine. `media_type` is the type of encoded bytes. `is_hit` is
    whether the arena had the item, None if nothing had to be computed. `content_hash` is the hash of the encoded bytes
    that it was made of.
    """

    ref: MediaRef
    feature: Feature
    hold: Hold | None = None
    media_type: str | None = None
    is_hit: bool | None = None
    content_hash: str | None = None


class StagedMedia(Protocol):
    """The media of one request, available in the form of any stage."""

    async def in_stage(self, stage: StageName) -> Sequence[StagedItem]:
        """Return all items in the order of the request. Each is looked up or computed once; the request's scope owns
        the holds.

        Raises MedialaneError.
        """
        ...

    async def without_embeddings(self) -> int:
        """Have `in_stage` return tensors for all items, also for items whose embedding it has returned before: return
        their number.

        Raises like `in_stage`, and HandoverFailed if the content of an item has changed since.
        """
        ...

    async def with_embeddings(self, mm_hashes: Collection[str]) -> Sequence[Feature]:
        """Have `in_stage` return the embeddings of these items, which have been encoded meanwhile, instead of their
        tensors. Return the features of all items; without a found embedding they are as before."""
        ...

    def note_embedded(self, mm_hashes: Collection[str]) -> None:
        """The embeddings of these items are in the arena now: their tensors are not needed for the next request."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether any of them was in the arena of a store that is lost."""
        ...


class PreparedPrompt(msgspec.Struct, frozen=True):
    """A prepared media prompt, together with its media.

    In a stage that `is_processed`, `token_ids` are expanded and `features` are in the order of the source's items. In
    other stages `token_ids` are the source's and there are no features. `mm_hashes` identify the items in every stage.

    A model with encoder and decoder has two prompts: `encoder_token_ids`, in which the placeholders are (the source's
    in other stages), and the decoder's, `token_ids`. For all others `encoder_token_ids` is None.
    """

    token_ids: list[int]
    features: tuple[PlacedFeature, ...]
    mm_hashes: tuple[str, ...]
    source: MediaPrompt
    media: StagedMedia
    encoder_token_ids: list[int] | None = None
    is_predicted: bool = False

    def __repr__(self) -> str:
        return f"PreparedPrompt({len(self.token_ids)} tokens, {len(self.features)} features)"


class MediaPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """One media item as sent to a worker, in any stage: its tensors by descriptor or by value.

    * Stage `features`: a feature's header and large tensors, and the item's `placeholder`.
    * Stage `decoded`: one tensor, laid out as in `types.media`: pixels or frames (uint8), or samples (float32).
    * Stage `url`: one tensor, the encoded bytes (uint8), their `media_type` and the decoding options `io`.

    `mm_hash` is the item's identifier in the engine, `param` its field in the client's request. `remote` is the
    entry of the tensors if it is in another host's arena: the worker has its own store copy it.

    In stage `features` an item may have an `embedding` instead of tensors. Otherwise, `embedding_wait_ms` is how long
    the worker may wait for another to encode the item, about the time of encoding it.
    """

    modality: Modality
    mm_hash: str
    header: Header
    tensors: SentTensors
    size: MediaSize = MediaSize()
    placeholder: PlaceholderRange | None = None
    media_type: str | None = None
    io: bytes = b"{}"
    param: str | None = None
    remote: RemoteEntry | None = None
    embedding: Embedding | None = None
    embedding_wait_ms: float = 0.0

    @property
    def entry(self) -> ArenaRange | None:
        """The arena entry of its tensors, which are all in the same, or of its embedding; None if it needs none."""
        return _entry(self.tensors, self.embedding)

    def __repr__(self) -> str:
        return f"MediaPayload({self.modality}, {self.mm_hash[:12]}, {[t.spec for t in self.tensors]}, {self.size})"


def _entry(tensors: Sequence[TensorDescriptor | InlineTensor], embedding: Embedding | None) -> ArenaRange | None:
    if embedding is not None:
        return embedding.tensor.range
    return next((tensor.range for tensor in tensors if isinstance(tensor, TensorDescriptor)), None)
