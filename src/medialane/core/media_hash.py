"""The identifiers that plain vLLM gives to the items of a request, for routers in front of its servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from medialane.core.feature import MediaPrompt
from medialane.core.media import Decoded, MediaRef, MediaSize

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

    def has_name(self, ref: MediaRef) -> bool:
        """Whether the hash follows from the client's `uuid`, so that the media are not needed."""
        ...

    def needs_decoding(self, item: EncodedItem) -> bool:
        """Whether vLLM hashes what it has decoded from this item: samples, frames or pixels."""
        ...

    def hashes(self, prompt: MediaPrompt, items: Sequence[HashedItem]) -> list[str]:
        """Return the hashes of the prompt's items, all of them, in their order. Raises InvalidRequest for options that
        the model's processor refuses."""
        ...
