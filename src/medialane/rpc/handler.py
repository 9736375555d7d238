"""What a worker does with the requests of its connections."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Protocol

from medialane.core.admin import AdminCall, AdminResult
from medialane.core.errors import ErrorReport, GenerationFailed, MedialaneError, to_report
from medialane.core.kv_events import KvChange
from medialane.core.metrics import MetricChanges
from medialane.core.request import EngineRequest, OutputDelta, WorkerLoad
from medialane.rpc.messages import Hello, Welcome

logger = logging.getLogger(__name__)


class Handler(Protocol):
    """Filled by the worker; called from the event loop only. Request ids are unique over all connections."""

    async def register(self, hello: Hello) -> Welcome:
        """Get to know a gateway. Version and token are checked already, its earlier connections have let go.

        Raises MedialaneError to refuse it. It is cancelled when the gateway leaves or its deadline passes; the gateway
        may then register again.
        """
        ...

    def left(self, hello: Hello) -> None:
        """The connection of a gateway that was registered is gone, and all of its requests have let go. Returns at
        once; the gateway may register again any time."""
        ...

    def run(self, request: EngineRequest) -> AsyncGenerator[OutputDelta, None]:
        """Answer one request; the last delta is `finished`. Raises MedialaneError, before the first delta or later.

        When the generator has ended, nothing of the request is read any more: the gateway is told so. It is cancelled
        once, wherever it waits, when the request is aborted or its gateway is lost, and takes then the time it needs
        to let go.
        """
        ...

    def loads(self) -> Sequence[WorkerLoad]:
        """How busy each of the worker's data-parallel ranks is, in their order. Cheap: called at every change."""
        ...

    def watch_blocks(self, listener: Callable[[KvChange], None]) -> Callable[[], None]:
        """Call `listener` with each change of the engine's KV blocks from now on, until the function that this returns
        is called. Numbers of changes are the caller's affair: `sequence` is 0 here."""
        ...

    async def administer(self, call: AdminCall) -> AdminResult:
        """Have the engine do `call`. Raises MedialaneError. It is cancelled when the gateway leaves; what has begun may
        be done all the same."""
        ...

    def metrics(self) -> Callable[[], list[MetricChanges]]:
        """A reader of this process's metrics, for one gateway. Each call of it, from any thread and never two at a
        time, gives what has changed since the last."""
        ...

    def held_blocks(self) -> Mapping[int, Sequence[int]]:
        """The block ids that each rank holds now, empty ranks included. Listeners know of all changes before it when it
        returns. The sequences stay as they are."""
        ...


def report_of(error: Exception, what: str) -> ErrorReport:
    """What the gateway is sent when a handler has raised `error` in `what`. Other errors than ours are only logged."""
    if isinstance(error, MedialaneError):
        return to_report(error)
    logger.error("%s failed: %r", what, error, exc_info=error)
    return to_report(GenerationFailed(f"the worker failed this {what}"))
