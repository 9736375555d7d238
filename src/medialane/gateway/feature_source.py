"""The source of a request's media: the interface that the gateway needs, implemented by `StoreFeatures`."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from medialane.core.errors import StoreUnavailable
from medialane.core.feature import Feature, FoundItem, Hold
from medialane.core.media import EncodedMedia, MediaRef
from medialane.core.tensor import ArenaRange
from medialane.gateway.image_budget import ImageBudget
from medialane.observability.timeline import StageTimeline


class FeatureSource(Protocol):
    """Finds or makes media items. The caller owns every hold that is returned.

    All raise MedialaneError with the request field of the reference: StoreUnavailable if the store is not connected.
    """

    async def resolve(self, ref: MediaRef) -> MediaRef:
        """Return `ref`, with the content and options of its alias if it has nothing else. Raises UnknownMediaUuid."""
        ...

    async def count_sent(self, ref: MediaRef, budget: ImageBudget) -> None:
        """Count an image that came with the request in `budget`."""
        ...

    async def processed(
        self, ref: MediaRef, options: bytes, timeline: StageTimeline, budget: ImageBudget, *, encoder: str = ""
    ) -> FoundItem[Feature]:
        """Return the feature of `ref`, processed with the options of the request and of `ref`. If the arena has its
        embedding by the `encoder` with this digest, it has that instead of tensors.

        An image of a URL that is not cached is counted in `budget` before it is decoded.
        """
        ...

    def forget(self, hold: Hold) -> None:
        """Look up the item of `hold` again for the next request: it may be found in another form."""
        ...

    async def decoded(self, ref: MediaRef, timeline: StageTimeline, budget: ImageBudget) -> FoundItem[Feature]:
        """Return the decoder's output for `ref`. `budget` is as in `processed`."""
        ...

    async def encoded(self, ref: MediaRef, timeline: StageTimeline, budget: ImageBudget) -> FoundItem[EncodedMedia]:
        """Return the current encoded bytes of `ref`. If their header must be checked, a preparer has opened them.

        An image of a URL is counted in `budget`.
        """
        ...

    def unavailable(self, message: str) -> StoreUnavailable:
        """Return the error of a request whose media were lost with the store."""
        ...

    def samples(self, feature: Feature) -> NDArray[np.float32]:
        """Return the samples of decoded audio, in the arena: valid while the caller holds them."""
        ...

    async def wave(self, samples: NDArray[np.float32], sample_rate: int) -> bytes:
        """Return a copy of the samples as a file (`core.wave`)."""
        ...

    async def publish(self, entry: ArenaRange) -> bytes:
        """Publish a decoded image, which the caller holds, for an RDMA read by another process; return its
        `media.published_image.PublishedImage` as JSON. Raises MediaUrlForbidden unless the operator allows it."""
        ...

    @property
    def arena(self) -> str | None:
        """The id of the arena in which items are found; None if the store is not connected."""
        ...

    def key(self, ref: MediaRef, options: bytes, *, content: str) -> str:
        """Return the feature key of `ref`, without preparing it. `content` is its content hash."""
        ...
