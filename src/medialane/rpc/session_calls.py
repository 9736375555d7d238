"""What a gateway asks of a worker beside requests: administrative calls, and the worker's metrics.

Each runs in a task of the session. When the connection is gone nobody waits for the answer: the tasks are cancelled,
and an engine that has begun finishes what it was asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from medialane.core.errors import ProtocolViolation, Unavailable, to_report
from medialane.core.metrics import MetricChanges
from medialane.rpc.handler import Handler, report_of
from medialane.rpc.messages import AdminDone, AdminFailed, Administer, MetricValues, ReadMetrics

logger = logging.getLogger(__name__)

#: Administrative calls under way on one connection; they are rare.
MAX_CALLS = 64


class SessionCalls:
    """Used on the event loop. The calls run as tasks of `tasks`, which must have been entered."""

    def __init__(self, handler: Handler, send: Callable[[msgspec.Struct], None], tasks: asyncio.TaskGroup) -> None:
        self._handler = handler
        self._send = send
        self._tasks = tasks
        self._changed_metrics = handler.metrics()
        self._calls: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None

    def start(self, message: Administer | ReadMetrics) -> None:
        """Answer `message` from a task. Raises ProtocolViolation for metrics that are being read."""
        if isinstance(message, ReadMetrics):
            if self._reading is not None and not self._reading.done():
                raise ProtocolViolation("metrics are asked for before the last ones have come")
            self._reading = self._tasks.create_task(self._read(), name="read metrics")
        elif len(self._calls) >= MAX_CALLS:
            error = Unavailable("the worker has as many administrative calls under way as it may have")
            self._send(AdminFailed(message.call_id, to_report(error)))
        else:
            name = f"administrative call {type(message.call).__name__}"
            task = self._tasks.create_task(self._do(message), name=name)
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    def cancel(self) -> None:
        """The connection is gone."""
        for task in self._calls:
            task.cancel()
        if self._reading is not None:
            self._reading.cancel()

    async def _do(self, message: Administer) -> None:
        logger.info("administrative call: %s", message.call)
        try:
            result = await self._handler.administer(message.call)
        except Exception as error:  # noqa: BLE001 - the supervisor: whatever a handler raises fails this call alone
            self._send(AdminFailed(message.call_id, report_of(error, "administrative call")))
        else:
            self._send(AdminDone(message.call_id, result))

    async def _read(self) -> None:
        pieces: list[MetricChanges] = []
        try:
            # Some milliseconds, in which tokens are on their way to clients.
            pieces = await asyncio.to_thread(self._changed_metrics)
        except Exception as error:  # noqa: BLE001 - a collector of anybody's in the registry
            report_of(error, "reading of metrics")
        for piece in pieces:
            self._send(MetricValues(piece, more=True))
        self._send(MetricValues(MetricChanges()))
