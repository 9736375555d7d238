"""A gateway's administrative calls and metric reads in flight; `session_calls` is the worker's side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from medialane.observability.worker_metrics import MetricMirror
from medialane.types.admin import AdminCall, AdminResult
from medialane.types.errors import ProtocolViolation, Unavailable, WorkerLost, from_report
from medialane.wire.protocol import AdminDone, AdminFailed, Administer, MetricValues, ReadMetrics


class ClientCalls:
    """The calls of one connection. `metrics` are the worker's as of the last `read_metrics`."""

    def __init__(self, send: Callable[[msgspec.Struct], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[AdminResult]] = {}
        self._num_calls = 0
        self._reading: asyncio.Future[None] | None = None
        self._lost = False
        self.metrics = MetricMirror()

    async def administer(self, call: AdminCall, timeout_s: float) -> AdminResult:
        """Run `call` on the worker's engine. A cancelled or timed-out call may still be executed there.

        Raises the error that the worker reports, WorkerLost if the connection is closed, Unavailable after `timeout_s`.
        """
        self._check_connected()
        self._num_calls += 1
        call_id = self._num_calls
        result: asyncio.Future[AdminResult] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = result
        try:
            self._send(Administer(call_id, call))
            async with asyncio.timeout(timeout_s):
                return await result
        except TimeoutError:
            raise Unavailable(f"no response within {timeout_s:g} s") from None
        finally:
            del self._waiting[call_id]

    async def read_metrics(self, timeout_s: float) -> bool:
        """Update `metrics`. Return False if the worker did not respond before the timeout: they are unchanged then, and
        a late response is still applied."""
        if self._lost:
            return False
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_future()
            self._send(ReadMetrics())
        done, _ = await asyncio.wait({self._reading}, timeout=timeout_s)
        return bool(done) and not self._lost

    def received(self, message: AdminDone | AdminFailed | MetricValues) -> None:
        """Apply a response. Raises ProtocolViolation if there was no such call."""
        if isinstance(message, MetricValues):
            self._take(message)
            return
        if not 0 < message.call_id <= self._num_calls:
            raise ProtocolViolation("a response to an unknown administrative call")
        result = self._waiting.get(message.call_id)
        if result is None or result.done():
            return  # cancelled or timed out
        if isinstance(message, AdminFailed):
            result.set_exception(from_report(message.error))
        else:
            result.set_result(message.result)

    def lost(self) -> None:
        """Fail all calls: the connection is closed."""
        self._lost = True
        for result in self._waiting.values():
            if not result.done():
                result.set_exception(WorkerLost("the worker was lost before it responded"))
        if self._reading is not None:
            self._reading.set_result(None)
            self._reading = None

    def _take(self, message: MetricValues) -> None:
        if self._reading is None:
            raise ProtocolViolation("metrics that were not requested")
        try:
            self.metrics.apply(message.changes)
        except ValueError as error:
            raise ProtocolViolation(f"invalid metrics: {error}") from error
        if not message.more:
            self._reading.set_result(None)
            self._reading = None

    def _check_connected(self) -> None:
        if self._lost:
            raise WorkerLost("the worker is not connected")
