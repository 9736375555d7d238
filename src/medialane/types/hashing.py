"""Content hashing: blake3-256, with length-delimited parts; and the identifiers that plain vLLM gives to the items of a
request, for routers in front of its servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
from blake3 import blake3

from medialane.types.feature import MediaPrompt
from medialane.types.media import Decoded, MediaRef, MediaSize

_decode_object = msgspec.json.Decoder(dict[str, object]).decode


def content_hash(data: bytes | bytearray | memoryview) -> str:
    """Return the hash of encoded media, 64 hex digits."""
    return blake3(data).hexdigest()


def canonical_options(options: Mapping[str, object]) -> bytes:
    """Encode options as JSON, independently of the order of their keys.

    Raises TypeError for values without a JSON representation.
    """
    return msgspec.json.encode(options, order="deterministic")


def merged_options(request: bytes, item: bytes) -> bytes:
    """Merge two canonical JSON objects, the options of a request and of one item; the item's take precedence."""
    if item == b"{}":
        return request
    if request == b"{}":
        return item
    return canonical_options({**_decode_object(request), **_decode_object(item)})


def owner_salt(owner: str, salt: str) -> str:
    """Return the salt of what an owner's requests with this `cache_salt` cache: no request of another owner has it."""
    return blake3(msgspec.msgpack.encode(("medialane-salt-1", owner, salt))).hexdigest()


def decoded_key(*, content: str, io: bytes, salt: str) -> str:
    """Return the key of an item's decoded form, 64 hex digits, without decoding it. Parameters as in `feature_key`."""
    return blake3(msgspec.msgpack.encode(("medialane-decoded-1", content, io, salt))).hexdigest()


def feature_key(*, processor: str, content: str, io: bytes, options: bytes, salt: str) -> str:
    """Return the key of an item's features, 64 hex digits, without decoding it.

    `processor` is the digest of model and processor settings, `content` the content hash. `io` are the decoding and
    `options` the processor options, both canonical JSON.
    """
    parts = ("medialane-feature-2", processor, content, io, options, salt)
    return blake3(msgspec.msgpack.encode(parts)).hexdigest()


def embedding_key(*, mm_hash: str, encoder: str) -> str:
    """Return the key of an item's embedding, 64 hex digits. `mm_hash` is its feature key, `encoder` the digest of all
    else that the encoder's output depends on (`request.EncoderCard`)."""
    return blake3(msgspec.msgpack.encode(("medialane-embedding-1", mm_hash, encoder))).hexdigest()


def digest(settings: Mapping[str, object]) -> str:
    """Return the digest of a mapping of settings, 64 hex digits."""
    return blake3(canonical_options(settings)).hexdigest()


def tensors_key(*, processor: str, modality: str, header: bytes, tensors: Sequence[memoryview], salt: str) -> str:
    """Return the key of features whose tensors a client has sent, 64 hex digits. It is the hash of their bytes,
    whatever their client calls them. `processor` and `salt` are as in `feature_key`."""
    key = blake3(msgspec.msgpack.encode(("medialane-tensors-1", processor, modality, header, salt)))
    for tensor in tensors:
        key.update(tensor)
    return key.hexdigest()


Bytes = bytes | memoryview


class EncodedItem(NamedTuple):
    """What is known of an item that has not been decoded. `size` is the media's true size with a video's metadata;
    `is_rgb` whether an image's file has RGB pixels without alpha, which vLLM does not convert."""

    ref: MediaRef
    data: Bytes
    size: MediaSize
    is_rgb: bool = True


class DecodedItem(NamedTuple):
    """An item that had to be decoded."""

    ref: MediaRef
    data: Bytes
    media: Decoded


#: A reference alone is of an item that has a name.
HashedItem = MediaRef | EncodedItem | DecodedItem


class MediaHasher(Protocol):
    """vLLM's own hashes, of the encoded bytes where vLLM hashes these. Called in any thread."""

    def needs_decoding(self, item: EncodedItem) -> bool:
        """Whether vLLM hashes what it has decoded from this item: samples, frames or pixels."""
        ...

    def hashes(self, prompt: MediaPrompt, items: Sequence[HashedItem]) -> list[str]:
        """Return the hashes of the prompt's items, all of them, in their order. Raises InvalidRequest for options that
        the model's processor refuses."""
        ...
