"""The one hash of the house: blake3-256, over parts whose boundaries are part of the hash."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from blake3 import blake3


def content_hash(data: bytes | bytearray | memoryview) -> str:
    """Hash encoded media: 64 hex digits."""
    return blake3(data).hexdigest()


def canonical_options(options: Mapping[str, object]) -> bytes:
    """Encode options so that equal options are equal bytes whatever the order of their keys.

    Raises TypeError for values that JSON does not have.
    """
    return msgspec.json.encode(options, order="deterministic")


def feature_key(*, processor: str, content: str, options: bytes, salt: str) -> str:
    """Identify the features of one item before it is decoded: 64 hex digits.

    `processor` is the digest of model and processor settings, `content` the content hash, `options` canonical.
    """
    parts = ("medialane-feature-1", processor, content, options, salt)
    return blake3(msgspec.msgpack.encode(parts)).hexdigest()


def digest(settings: Mapping[str, object]) -> str:
    """Digest of a mapping of settings: 64 hex digits."""
    return blake3(canonical_options(settings)).hexdigest()
