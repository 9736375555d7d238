"""One item of stage `decoded` or `url`, as it lies in the arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from medialane.arena import Lease
from medialane.core.feature import Feature, HandedMedia
from medialane.core.media import EncodedMedia, MediaRef, MediaSize
from medialane.core.tensor import InlineTensor, TensorDescriptor

SourceStage = Literal["decoded", "url"]


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """What a worker is given to process by itself, and the request's lease on it.

    `mm_hash` is the key that the item's feature would have here. `is_hit` is None where there was nothing to make.
    """

    ref: MediaRef
    mm_hash: str
    lease: Lease[Feature] | Lease[EncodedMedia]
    tensors: tuple[TensorDescriptor, ...]
    size: MediaSize
    media_type: str | None = None
    is_hit: bool | None = None

    def handed(self, tensors: tuple[TensorDescriptor | InlineTensor, ...]) -> HandedMedia:
        """The item as it travels, its tensors in the form that the transport gave them."""
        return HandedMedia(
            self.ref.modality,
            self.mm_hash,
            b"",
            tensors,
            self.size,
            media_type=self.media_type,
            io=self.ref.io,
            param=self.ref.param,
        )
