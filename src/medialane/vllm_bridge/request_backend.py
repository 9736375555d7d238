"""What vLLM's app needs from the gateway; `gateway.Gateway` is one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from medialane.core.admin import AdminCall, AdminResult
from medialane.core.errors import MedialaneError
from medialane.core.feature import MediaPrompt, PreparedPrompt
from medialane.core.media import MediaRef
from medialane.core.request import EngineRequest, OutputDelta


class RequestBackend(Protocol):
    @property
    def ready(self) -> bool:
        """Whether a worker takes requests."""
        ...

    def fail(self, error: MedialaneError) -> None:
        """Remember that the current request fails with `error`: it is answered with that, whatever vLLM's app makes of
        the exception."""
        ...

    def resolve(self, url: str) -> MediaRef:
        """The reference that intake left in place of a media URL or a uuid of the current request.

        Raises InvalidMediaUrl, and UnknownMediaUuid for an item given by a uuid alone that means nothing here.
        """
        ...

    async def prepare(self, prompt: MediaPrompt) -> PreparedPrompt:
        """Features and expanded prompt. Raises MedialaneError."""
        ...

    async def administer(self, call: AdminCall) -> list[AdminResult]:
        """Have every worker's engine do `call`; their answers. Raises MedialaneError, which says who has not."""
        ...

    def generate(self, request: EngineRequest, prepared: PreparedPrompt | None) -> AsyncGenerator[OutputDelta, None]:
        """Stream the answer; closing aborts. Raises MedialaneError."""
        ...
