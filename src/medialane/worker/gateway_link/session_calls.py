"""A gateway's administrative calls and metric reads at the worker.

Each runs as a task of the session. When the connection is closed, the tasks are cancelled; a call that the engine has
started still completes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from medialane.types.admin import clears_encoder_cache
from medialane.types.errors import ProtocolViolation, Unavailable, report_of, to_report
from medialane.types.request import EncoderCard
from medialane.types.stats import MetricChanges
from medialane.wire.protocol import AdminDone, AdminFailed, Administer, Command, Drain, MetricValues, ReadMetrics
from medialane.worker.gateway_link.handler import Handler

logger = logging.getLogger(__name__)

#: Most administrative calls in flight on one connection; they are rare.
MAX_CALLS = 64


class SessionCalls:
    """Used on the event loop. The calls run as tasks of `tasks`, which must have been entered."""

    def __init__(
        self,
        handler: Handler,
        send: Callable[[msgspec.Struct], None],
        tasks: asyncio.TaskGroup,
        *,
        on_encoder_cleared: Callable[[EncoderCard | None], None],
    ) -> None:
        self._handler = handler
        self._on_encoder_cleared = on_encoder_cleared
        self._send = send
        self._tasks = tasks
        self._changed_metrics = handler.metrics()
        self._calls: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None

    def start(self, message: Command) -> None:
        """Handle `message`, if necessary in a task. Raises ProtocolViolation for a second metric read in flight."""
        if isinstance(message, Drain):
            logger.warning("an operator asks this worker to drain")
            self._handler.drain()
        elif isinstance(message, ReadMetrics):
            if self._reading is not None and not self._reading.done():
                raise ProtocolViolation("metrics were requested while a read is in flight")
            self._reading = self._tasks.create_task(self._read(), name="read metrics")
        elif len(self._calls) >= MAX_CALLS:
            error = Unavailable("the worker has reached its limit of concurrent administrative calls")
            self._send(AdminFailed(message.call_id, to_report(error)))
        else:
            name = f"administrative call {type(message.call).__name__}"
            task = self._tasks.create_task(self._do(message), name=name)
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    def cancel(self) -> None:
        """Cancel all tasks: the connection is closed."""
        for task in self._calls:
            task.cancel()
        if self._reading is not None:
            self._reading.cancel()

    async def _do(self, message: Administer) -> None:
        logger.info("administrative call: %s", message.call)
        before = self._handler.encoder
        try:
            result = await self._handler.administer(message.call)
        except asyncio.CancelledError:
            self._note_cleared(before, clears_encoder_cache(message.call))  # the engine may still complete the call
            raise
        except Exception as error:  # noqa: BLE001 - the supervisor: whatever a handler raises fails this call alone
            self._note_cleared(before)
            self._send(AdminFailed(message.call_id, report_of(error, "administrative call")))
        else:
            self._note_cleared(before, clears_encoder_cache(message.call))
            self._send(AdminDone(message.call_id, result))

    def _note_cleared(self, before: EncoderCard | None, is_cleared: bool = False) -> None:
        encoder = self._handler.encoder
        if is_cleared or encoder != before:
            self._on_encoder_cleared(encoder)

    async def _read(self) -> None:
        pieces: list[MetricChanges] = []
        try:
            # In a thread: it takes some milliseconds, which would delay tokens of other requests.
            pieces = await asyncio.to_thread(self._changed_metrics)
        except Exception as error:  # noqa: BLE001 - a third-party collector in the registry
            report_of(error, "reading of metrics")
        for piece in pieces:
            self._send(MetricValues(piece, more=True))
        self._send(MetricValues(MetricChanges()))
