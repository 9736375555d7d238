"""The interface that a worker implements for its connections."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Protocol

from medialane.types.admin import AdminCall, AdminResult
from medialane.types.kv_blocks import KvChange
from medialane.types.request import EncoderCard, EngineRequest, OutputDelta, WorkerLoad
from medialane.types.stats import MetricChanges
from medialane.wire.protocol import Hello, Welcome


class Handler(Protocol):
    """Implemented by the worker; called from the event loop only. Request ids are unique across connections."""

    @property
    def encoder(self) -> EncoderCard | None:
        """The engine's encoder now: an administrative call may replace the card's."""
        ...

    @property
    def is_stalled(self) -> bool:
        """Whether the engine hangs: requests are better sent to another worker."""
        ...

    @property
    def is_draining(self) -> bool:
        """Whether the worker stops, and takes no new requests."""
        ...

    @property
    def has_unknown_blocks(self) -> bool:
        """Whether the engine's KV blocks cannot be compared with prompts, so that none are reported."""
        ...

    async def register(self, hello: Hello) -> Welcome:
        """Register a gateway whose version is ours and whose earlier requests are all released.

        Raises MedialaneError to refuse it. Cancelled when the gateway disconnects or the timeout expires; the gateway
        may then register again.
        """
        ...

    def drain(self) -> None:
        """Stop: accept no new requests, and end when the running ones have ended, or after a timeout. Idempotent."""
        ...

    def run(self, request: EngineRequest) -> AsyncGenerator[OutputDelta, None]:
        """Run one request; the last delta is `finished`. Raises MedialaneError, before the first delta or later.

        When the generator ends, the request's media are no longer read, and Released is sent to the gateway. It is
        cancelled once, at any await, when the request is aborted or its gateway is lost, and may then take time to
        release the media.
        """
        ...

    def loads(self) -> Sequence[WorkerLoad]:
        """Return the load of each data-parallel rank, in order. Must be cheap: called at every change."""
        ...

    def watch_arena(self, listener: Callable[[str | None], None]) -> Callable[[], None]:
        """Call `listener` with the arena that the worker has mapped, now and after each change, until the returned
        function is called."""
        ...

    def watch_blocks(self, listener: Callable[[KvChange], None]) -> Callable[[], None]:
        """Call `listener` with each change of the engine's KV blocks until the returned function is called."""
        ...

    async def administer(self, call: AdminCall) -> AdminResult:
        """Run `call` on the engine. Raises MedialaneError. Cancelled when the gateway disconnects; a call that has
        started may still complete."""
        ...

    def metrics(self) -> Callable[[], list[MetricChanges]]:
        """Return a reader of this process's metrics for one gateway. Each call of the reader returns the changes since
        its last call. It may be called from any thread, but not concurrently."""
        ...

    def held_blocks(self) -> Mapping[int, Sequence[int]]:
        """Return the block ids that each rank holds now, empty ranks included. Listeners have been called for all
        earlier changes when it returns. The returned sequences do not change."""
        ...
