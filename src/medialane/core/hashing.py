"""The one hash of the house: blake3-256, over parts whose boundaries are part of the hash."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from blake3 import blake3

_decode_object = msgspec.json.Decoder(dict[str, object]).decode


def content_hash(data: bytes | bytearray | memoryview) -> str:
    """Hash encoded media: 64 hex digits."""
    return blake3(data).hexdigest()


def canonical_options(options: Mapping[str, object]) -> bytes:
    """Encode options so that equal options are equal bytes whatever the order of their keys.

    Raises TypeError for values that JSON does not have.
    """
    return msgspec.json.encode(options, order="deterministic")


def merged_options(request: bytes, item: bytes) -> bytes:
    """Canonical options of one item: the request's, its own winning key by key. Both are JSON objects, canonical."""
    if item == b"{}":
        return request
    if request == b"{}":
        return item
    return canonical_options({**_decode_object(request), **_decode_object(item)})


def decoded_key(*, content: str, io: bytes, salt: str) -> str:
    """Identify the decoded form of one item before it is decoded: 64 hex digits. Parts are as in `feature_key`."""
    return blake3(msgspec.msgpack.encode(("medialane-decoded-1", content, io, salt))).hexdigest()


def feature_key(*, processor: str, content: str, io: bytes, options: bytes, salt: str) -> str:
    """Identify the features of one item before it is decoded: 64 hex digits.

    `processor` is the digest of model and processor settings, `content` the content hash. `io` says how to decode,
    `options` how to process; both are canonical.
    """
    parts = ("medialane-feature-2", processor, content, io, options, salt)
    return blake3(msgspec.msgpack.encode(parts)).hexdigest()


def digest(settings: Mapping[str, object]) -> str:
    """Digest of a mapping of settings: 64 hex digits."""
    return blake3(canonical_options(settings)).hexdigest()
