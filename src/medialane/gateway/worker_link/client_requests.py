"""The requests that a gateway has sent over one connection; `session_requests` is the worker's side."""

from __future__ import annotations

from medialane.gateway.worker_link.remote_request import RemoteRequest
from medialane.types.errors import (
    ErrorReport,
    GenerationFailed,
    HandoverFailed,
    MedialaneError,
    ProtocolViolation,
    WorkerBusy,
    WorkerDraining,
    WorkerLost,
    from_report,
)
from medialane.types.request import EngineRequest, OutputDelta
from medialane.types.retry_after import Places
from medialane.wire.config import RpcConfig
from medialane.wire.connection import Connection
from medialane.wire.payload import OutgoingRequest, split
from medialane.wire.pooled_output import PooledOutput
from medialane.wire.protocol import Abort, Submit


class ClientRequests:
    """Requests from `submit` until the worker has released them; `len` is their number.

    The `on_...` methods are called for messages of the worker. They raise ProtocolViolation if the request is not in
    flight.
    """

    def __init__(self, connection: Connection, config: RpcConfig) -> None:
        self._connection = connection
        self._config = config
        self._requests: dict[str, RemoteRequest] = {}
        self._places = Places()
        self._outgoing: dict[str, OutgoingRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes of inline tensors that are still to be sent."""
        return sum(outgoing.num_bytes_left for outgoing in self._outgoing.values())

    def submit(self, request: EngineRequest) -> RemoteRequest:
        """Send a request. Errors are raised by its iteration. If it cannot be sent, these are

        * WorkerLost: the connection is closed;
        * WorkerBusy: `max_in_flight` or `max_write_buffer_bytes` is reached;
        * HandoverFailed: with its inline tensors it exceeds the message size limit.

        The caller holds the inline tensors until the iteration has ended or `abort` was called. Raises
        GenerationFailed, with no effect, if a request with this id is in flight.
        """
        request_id = request.request_id
        if request_id in self._requests:
            raise GenerationFailed("a request with this id is already running")
        remote = RemoteRequest(
            request_id,
            max_queued_bytes=self._config.max_queued_bytes,
            mergeable=not request.cumulative,
            pooled=PooledOutput(self._config.max_pooled_bytes) if request.is_pooling else None,
            send_abort=self._abort,
        )
        try:
            self._check_capacity()
            self._send(request)
        except MedialaneError as error:
            remote.on_error(error)
            remote.on_release()
        else:
            self._requests[request_id] = remote
            self._places.take(request_id)
        return remote

    def on_output(self, delta: OutputDelta, num_bytes: int) -> None:
        self._request(delta.request_id).on_output(delta, num_bytes)

    def on_failed(self, request_id: str, report: ErrorReport) -> None:
        self._request(request_id).on_error(from_report(report))

    def on_released(self, request_id: str) -> None:
        remote = self._request(request_id)
        self._end(request_id)
        remote.on_release()

    def fail_movable(self, error: MedialaneError) -> None:
        """Abort the requests that another worker can take over; their iterations raise `error`."""
        for remote in list(self._requests.values()):
            if remote.can_move:
                remote.abort(error)

    def fail(self, error: MedialaneError) -> None:
        """Abort all requests; their iterations raise `error`."""
        for remote in list(self._requests.values()):
            remote.abort(error)

    def lost(self, *, is_draining: bool) -> None:
        """Fail all requests: the connection is closed. A worker that `is_draining` has ended as planned."""
        for outgoing in list(self._outgoing.values()):
            outgoing.cancel()
        requests, self._requests = self._requests, {}
        for remote in requests.values():
            remote.on_error(
                WorkerDraining("the worker has stopped")
                if is_draining
                else WorkerLost("the worker was lost during generation")
            )

    def _end(self, request_id: str) -> RemoteRequest:
        self._places.free(request_id)
        return self._requests.pop(request_id)

    def _request(self, request_id: str) -> RemoteRequest:
        try:
            return self._requests[request_id]
        except KeyError:
            raise ProtocolViolation("a message about a request that is not in flight") from None

    def _check_capacity(self) -> None:
        if self._connection.closed.is_set():
            raise WorkerLost("the worker was lost before the request was sent")
        if len(self._requests) >= self._config.max_in_flight:
            message = "the worker has reached its limit of concurrent requests"
            raise WorkerBusy(message, retry_after_s=self._places.promise())
        if self._connection.num_buffered_bytes + self.num_unsent_bytes > self._config.max_write_buffer_bytes:
            raise WorkerBusy("the worker is overloaded", retry_after_s=self._places.promise())

    def _send(self, request: EngineRequest) -> None:
        message, tensors = split(request)
        try:
            if tensors:
                self._send_in_pieces(message, tensors)
            else:
                self._connection.send(Submit(request), at_once=True)
        except ProtocolViolation:
            raise HandoverFailed("the request exceeds the message size limit") from None

    def _send_in_pieces(self, request: EngineRequest, tensors: list[memoryview]) -> None:
        """Raises ProtocolViolation, with nothing sent, if the request is larger than allowed."""
        request_id = request.request_id

        def ended() -> None:
            del self._outgoing[request_id]

        outgoing = OutgoingRequest(request, tensors, ended, max_bytes=self._config.max_frame_bytes)
        self._outgoing[request_id] = outgoing
        self._connection.send_in_pieces(outgoing)

    def _abort(self, request_id: str) -> None:
        if (outgoing := self._outgoing.get(request_id)) is not None:  # not yet submitted to the worker
            outgoing.cancel()
            self._end(request_id).on_release()
        elif request_id in self._requests:
            self._connection.send(Abort(request_id))
