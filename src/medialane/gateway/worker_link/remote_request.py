"""The gateway's handle on one request at a worker."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from medialane.types.errors import GenerationFailed, MedialaneError
from medialane.types.request import OutputDelta, merge_deltas
from medialane.wire.pooled_output import PooledOutput

#: Deltas that are queued for the consumer and delivered one by one. More are merged: the client reads too slowly, or
#: this process is short of CPU time for seconds, and what merging saves lets it catch up.
MAX_SEPARATE_DELTAS = 64


class RemoteRequest:
    """Async iterator over the output deltas, for one consumer. Created by `ClientRequests.submit`.

    Deltas are delivered as they were received, although several may have arrived while this process was busy: to a
    client each is an event. If `mergeable`, more than `MAX_SEPARATE_DELTAS` are merged. The parts of a `pooled` output
    are one delta.

    The iteration ends after the finished delta. It raises the error reported by the worker, WorkerLost if the
    connection is closed first, GenerationFailed after `abort` or if more than `max_queued_bytes` are queued for a slow
    consumer. Deltas received before an error of the worker are returned first. A consumer that stops early must call
    `abort`: leaving the loop does not stop the worker.
    """

    def __init__(
        self,
        request_id: str,
        *,
        max_queued_bytes: int,
        mergeable: bool = True,
        pooled: PooledOutput | None = None,
        send_abort: Callable[[str], None],
    ) -> None:
        self.request_id = request_id
        #: By time.perf_counter, just before it is written: the worker may have its first token before this process runs
        #: again.
        self.sent_at = time.perf_counter()
        self._max_queued_bytes = max_queued_bytes
        self._mergeable = mergeable
        self._pooled = pooled
        self._send_abort = send_abort
        self._queue: deque[tuple[OutputDelta, int]] = deque()
        self._num_queued_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._complete = False
        #: Whether the worker has sent any output.
        self.has_output = False
        #: Whether the answer can go on at another worker once it has begun.
        self.can_continue = False
        self._error: MedialaneError | None = None

    def __aiter__(self) -> RemoteRequest:
        return self

    async def __anext__(self) -> OutputDelta:
        while not self._queue:
            if self._error is not None:
                raise self._error
            if self._complete:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError("a RemoteRequest has one consumer")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._mergeable and len(self._queue) > MAX_SEPARATE_DELTAS:
            deltas = [delta for delta, _ in self._queue]
            self._queue.clear()
            self._num_queued_bytes = 0
            return merge_deltas(deltas)
        delta, nbytes = self._queue.popleft()
        self._num_queued_bytes -= nbytes
        return delta

    @property
    def can_move(self) -> bool:
        """Whether another worker can take over: it has delivered nothing, or what it has can be continued."""
        return self.can_continue or self._pooled is not None or not self.has_output

    def abort(self, error: MedialaneError | None = None) -> None:
        """Abort the request at the worker; the iteration raises `error`, by default GenerationFailed. No effect once
        the output is complete or has failed. Idempotent. Afterwards its inline tensors are no longer read."""
        self._give_up(error or GenerationFailed("the request was aborted"))

    # The methods below are called by ClientRequests.

    def on_output(self, delta: OutputDelta, nbytes: int) -> None:
        if self._complete:
            return  # sent before our abort arrived
        self.has_output = True
        if self._pooled is not None:
            self._on_pooled(self._pooled, delta)
            return
        if self._queue and self._num_queued_bytes + nbytes > self._max_queued_bytes:
            self._give_up(GenerationFailed("the response is read too slowly"))
            return
        self._queue.append((delta, nbytes))
        self._num_queued_bytes += nbytes
        self._complete = delta.finished
        self._wake()

    def on_error(self, error: MedialaneError) -> None:
        if not self._complete:
            self._complete = True
            self._error = error
            self._wake()

    def on_release(self) -> None:
        self.on_error(GenerationFailed("the worker released the request before its output was complete"))

    def _on_pooled(self, output: PooledOutput, part: OutputDelta) -> None:
        try:
            whole = output.add(part)
        except MedialaneError as error:
            self._give_up(error)
            return
        if whole is not None:
            self._queue.append((whole, 0))
            self._complete = True
            self._wake()

    def _give_up(self, error: MedialaneError) -> None:
        if self._complete:
            return
        self._queue.clear()
        self._num_queued_bytes = 0
        self.on_error(error)
        self._send_abort(self.request_id)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
