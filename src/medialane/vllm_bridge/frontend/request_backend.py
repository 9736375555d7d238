"""The interface of the gateway to vLLM's app; implemented by `gateway.AppBackend`, and split by who calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from medialane.prepare.processor import ProcessedItem
from medialane.types.admin import AdminCall, AdminResult
from medialane.types.errors import MedialaneError
from medialane.types.feature import Feature, MediaPrompt, PlaceholderRange, PreparedPrompt, StagedItem
from medialane.types.media import MediaRef
from medialane.types.request import Continuable, EngineRequest, OutputDelta


class PromptMedia(Protocol):
    """The media of the current request's prompts."""

    async def prepare(self, prompt: MediaPrompt, *, with_tensors: bool = False) -> PreparedPrompt:
        """Return features and expanded prompt. `with_tensors`, the features have tensors even if embeddings of theirs
        are known. Raises MedialaneError."""
        ...

    async def describe(self, prompt: MediaPrompt) -> PreparedPrompt:
        """As `prepare`, but nothing is decoded or processed for items whose headers are known from their media's size:
        then no feature has tensors, and the result `is_predicted`. Raises MedialaneError."""
        ...

    def tensors(self, feature: Feature) -> list[memoryview]:
        """Return the bytes of the large tensors of a feature of `prepare`, read-only: in the arena, valid until the
        current request ends. Raises MedialaneError if the arena is lost."""
        ...

    async def refer(self, prepared: PreparedPrompt) -> list[str]:
        """Return references to the features of a prompt, by which the current client may name them in later requests.
        Raises MedialaneError."""
        ...

    async def audio(self, samples: NDArray[np.float32], sample_rate: int) -> MediaRef:
        """Return a reference to a part of an upload, which is its own media item. Raises BodyMemoryExhausted."""
        ...


class MediaReferences(Protocol):
    """What intake has made of the current request's body: references in place of media."""

    def resolve(self, url: str) -> MediaRef:
        """Return the reference by which intake replaced a media URL of the current request. Raises InvalidMediaUrl."""
        ...

    def original_url(self, url: str) -> str:
        """Return the client's URL which intake replaced by `url`. Called in any thread. Raises InvalidMediaUrl."""
        ...

    async def by_uuid(self, url: str) -> MediaRef:
        """Return the reference by which intake replaced a uuid of the current request, with the content and options to
        which the uuid is bound. Raises InvalidMediaUrl, UnknownMediaUuid, StoreUnavailable."""
        ...

    async def decode_audio(self, url: str, sample_rate: int) -> bytes:
        """Return the mono samples of an uploaded file, to which intake has given this reference, as a WAV file.
        Raises MedialaneError."""
        ...


class Rendering(Protocol):
    """How the prompts of the current request are rendered."""

    @property
    def text_bytes(self) -> int | None:
        """Size of the current request's JSON body without its media; None if the request has no such body."""
        ...

    @property
    def salt(self) -> str | None:
        """What only requests of the current one's owner and `cache_salt` have: others find nothing that it caches.
        None if intake has not parsed the body: nothing is cached."""
        ...

    def rendering(self) -> AbstractContextManager[object]:
        """Measure the block, in which a prompt is rendered."""
        ...


class ClientFeatures(Protocol):
    """Processed items that clients name, send and are sent."""

    async def find_feature(self, ref: MediaRef, *, with_tensors: bool = False) -> StagedItem:
        """Return the feature that a client names (`MediaRef.is_feature`). `with_tensors` as in `prepare`. Raises
        UnknownMedia, and MedialaneError."""
        ...

    async def named_feature(self, mm_hash: str, salt: str) -> Feature:
        """Return the feature that the current client names, of a request with this `cache_salt`, with its tensors.
        Raises UnknownMedia, and MedialaneError."""
        ...

    async def put_feature(self, ref: MediaRef, item: ProcessedItem) -> StagedItem:
        """Return the feature of tensors that the client has sent. Raises MedialaneError."""
        ...

    async def place(
        self, token_ids: list[int], items: Sequence[StagedItem], ranges: Sequence[PlaceholderRange]
    ) -> PreparedPrompt:
        """Return an expanded prompt with these items, each at the offset and with the length of its range. Raises
        InvalidRequest if the prompt has other placeholders, and MedialaneError."""
        ...

    def sending(self, num_bytes: int) -> AbstractAsyncContextManager[None]:
        """Send tensors of the arena in the block, this many bytes, as long as the client may take to read them: then it
        raises ClientDisconnected, and what is read no longer is released."""
        ...


class Generation(Protocol):
    """The engines, and how the current request ends."""

    def check_ready(self) -> None:
        """Raise NoWorkerReady if no worker accepts requests."""
        ...

    def generate(
        self, request: EngineRequest, prepared: PreparedPrompt | None, continuable: Continuable | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Stream the output; closing aborts the request. If its worker is lost, an answer that has begun goes on at
        another one if it is `continuable`. Raises MedialaneError."""
        ...

    def has_next(self) -> bool:
        """Return whether the next output of the current request, which has one prompt, has arrived."""
        ...

    async def administer(self, call: AdminCall) -> list[AdminResult]:
        """Make every worker's engine execute `call`, and return the results. Raises MedialaneError, which names the
        workers that failed."""
        ...

    def fail(self, error: MedialaneError) -> None:
        """Record that the current request fails with `error`: the response is built from it, however vLLM's app handles
        the exception."""
        ...


class RequestBackend(PromptMedia, MediaReferences, Rendering, ClientFeatures, Generation, Protocol):
    """All that the app needs of a gateway; what needs less says so."""
