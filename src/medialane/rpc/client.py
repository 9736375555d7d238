"""The gateway's end: one connection to one worker."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from medialane.core.admin import AdminCall, AdminResult
from medialane.core.errors import (
    GenerationFailed,
    HandoverFailed,
    MedialaneError,
    NoWorkerReady,
    ProtocolViolation,
    WorkerLost,
    from_report,
)
from medialane.core.kv_events import KvChange
from medialane.core.request import EngineRequest, ModelCard, WorkerLoad
from medialane.observability.worker_metrics import MetricMirror
from medialane.rpc.address import TcpAddress, UnixAddress, parse_address
from medialane.rpc.block_inbox import BlockInbox
from medialane.rpc.client_calls import ClientCalls
from medialane.rpc.config import RpcConfig
from medialane.rpc.connection import Connection
from medialane.rpc.messages import (
    Abort,
    AdminDone,
    AdminFailed,
    Failed,
    Hello,
    KvBlocks,
    LoadReport,
    MetricValues,
    Output,
    Ping,
    Pong,
    Refused,
    Released,
    ResyncBlocks,
    Submit,
    Welcome,
    decode_from_worker,
)
from medialane.rpc.payload import OutgoingRequest, split
from medialane.rpc.remote_request import RemoteRequest

#: Of a worker's card: far beyond any engine, and few enough for what is kept by them.
_MAX_BLOCK_SIZE: Final = 1 << 16
_MAX_RANKS: Final = 1 << 12
_MAX_KV_BLOCKS: Final = 1 << 32


class RpcClient:
    """A connection on which the worker has welcomed us. It does not reconnect: `connect` again after `closed`."""

    welcome: Welcome

    def __init__(self, config: RpcConfig) -> None:
        self._config = config
        self._welcomed: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._requests: dict[str, RemoteRequest] = {}
        self._outgoing: dict[str, OutgoingRequest] = {}
        self._blocks = BlockInbox()
        self._num_ranks = 0
        self._on_blocks: Callable[[KvChange], None] | None = None
        self._giving: asyncio.Handle | None = None
        self._on_loads: Callable[[Sequence[WorkerLoad]], None] | None = None
        self._on_lost: Callable[[], None] | None = None
        self._num_pings = 0
        self._connection = Connection(self, config, max_frame_bytes=config.max_frame_bytes)
        self._calls = ClientCalls(self._connection.send)
        self.loads: Sequence[WorkerLoad] = ()  # of each rank, as it reported last; empty until then

    @classmethod
    async def connect(cls, address: str, hello: Hello, config: RpcConfig) -> RpcClient:
        """Connect and register; `config.token` is sent in place of the hello's.

        When this returns, the worker reads nothing of this gateway's earlier connections. Raises

        * NoWorkerReady: nobody listens there, and only then: the worker's process is gone or not up yet;
        * WorkerLost: unreachable, no answer within `connect_timeout_s`, hung up, or not able to take us now;
        * StartupFailed and others: refused until somebody changes something (token, version, model);
        * ProtocolViolation: who listens there is not a worker.

        Cancellation and errors leave no connection behind.
        """
        client = cls(config)
        try:
            async with asyncio.timeout(config.connect_timeout_s):
                await client._dial(parse_address(address))
                client._connection.send(msgspec.structs.replace(hello, token=config.token))
                client.welcome = await client._welcomed
        except BaseException as error:
            client._welcomed.cancel()
            client._connection.end(WorkerLost("registration was given up"))
            if isinstance(error, TimeoutError):
                raise WorkerLost("the worker did not answer in time") from None
            raise
        return client

    @property
    def closed(self) -> asyncio.Event:
        """Set when the connection is gone, whoever ended it."""
        return self._connection.closed

    @property
    def num_block_gaps(self) -> int:
        """How often changes of KV blocks were missing, and all of them were told again."""
        return self._blocks.num_gaps

    @property
    def num_in_flight(self) -> int:
        """Requests that the worker has not released."""
        return len(self._requests)

    def submit(
        self,
        request: EngineRequest,
        *,
        on_released: Callable[[str], None] | None = None,
        on_sent: Callable[[str], None] | None = None,
    ) -> RemoteRequest:
        """Send a request. It fails through its iteration: also when it could not be sent, with

        * WorkerLost: the connection is gone;
        * NoWorkerReady: `max_in_flight` or `max_write_buffer_bytes` is reached;
        * HandoverFailed: it is larger than a message may be, its inline tensors counted.

        `on_released` is called with its id as soon as the worker has let go of it, at once if it was not sent, never if
        the connection is lost before. `on_sent` is called with its id once the bytes of its inline tensors are read no
        more: they are copied, or it is over; not if it could not be sent. Raises GenerationFailed for an id that is
        under way, having done nothing.
        """
        request_id = request.request_id
        if request_id in self._requests:
            raise GenerationFailed("a request with this id is under way")
        remote = RemoteRequest(
            request_id,
            max_queued_bytes=self._config.max_queued_bytes,
            mergeable=not request.cumulative,
            send_abort=self._abort,
            on_released=on_released,
        )
        try:
            self._send(request, on_sent or _nothing)
        except MedialaneError as error:
            remote.on_error(error)
            remote.on_release()
        else:
            self._requests[request_id] = remote
        return remote

    def watch(
        self,
        *,
        on_blocks: Callable[[KvChange], None],
        on_loads: Callable[[Sequence[WorkerLoad]], None],
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """Call back, from now on until the connection is gone: `on_blocks` with what the worker holds and how that
        changes, in order, a part in each round of the loop; `on_loads` with each report; last `on_lost`, when `closed`
        is set. What was reported before is kept for `on_blocks`. Called once, on a live connection."""
        self._on_blocks, self._on_loads, self._on_lost = on_blocks, on_loads, on_lost
        self._give_soon()

    @property
    def metrics(self) -> MetricMirror:
        """The worker's metrics, as of the last `read_metrics`."""
        return self._calls.metrics

    async def administer(self, call: AdminCall, timeout_s: float) -> AdminResult:
        """See `ClientCalls.administer`."""
        return await self._calls.administer(call, timeout_s)

    async def read_metrics(self, timeout_s: float) -> bool:
        """See `ClientCalls.read_metrics`."""
        return await self._calls.read_metrics(timeout_s)

    async def wait_closed(self) -> None:
        await self.closed.wait()

    async def close(self) -> None:
        """End the connection at once; what is under way is cancelled there and raises WorkerLost here. Idempotent."""
        self._connection.end(WorkerLost("the connection was closed"))
        await self.closed.wait()

    # What the connection tells, from here on; see connection.Peer.

    def opened(self, connection: Connection) -> None:
        pass

    def received(self, frame: memoryview) -> None:
        message = decode_from_worker(frame)
        match message:
            case Output(delta):
                self._request(delta.request_id).on_output(delta, len(frame))
            case Released(request_id):
                self._request(request_id)
                self._requests.pop(request_id).on_release()
            case Failed(request_id, report):
                self._request(request_id).on_error(from_report(report))
            case LoadReport(loads):
                self._take_loads(loads)
            case KvBlocks(change):
                self._take_blocks(change)
            case AdminDone() | AdminFailed() | MetricValues():
                self._calls.received(message)
            case Pong():
                pass  # that it came is what counts
            case Welcome():
                self._open(message)
            case Refused(report):
                self._connection.end(_refusal(from_report(report)))

    def beat(self) -> None:
        self._num_pings += 1
        self._connection.send(Ping(self._num_pings))

    def lost(self, error: MedialaneError) -> None:
        if not self._welcomed.done():
            self._welcomed.set_exception(error)
        if self._giving is not None:
            self._giving.cancel()
        self._on_blocks = self._on_loads = None
        self._calls.lost(error)
        for outgoing in list(self._outgoing.values()):
            outgoing.cancel()
        requests, self._requests = self._requests, {}
        for remote in requests.values():
            remote.on_lost(WorkerLost("the worker was lost before the answer was complete"))
        if self._on_lost is not None:
            self._on_lost()

    async def _dial(self, target: UnixAddress | TcpAddress) -> None:
        loop = asyncio.get_running_loop()
        try:
            if isinstance(target, UnixAddress):
                await loop.create_unix_connection(lambda: self._connection, target.path)
            else:
                await self._dial_tcp(target)
        except (ConnectionRefusedError, FileNotFoundError):
            raise NoWorkerReady("no worker listens there") from None
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise WorkerLost(f"the worker cannot be reached: {reason}") from error

    async def _dial_tcp(self, target: TcpAddress) -> None:
        """Try every address of the host. Refused is raised only if all refused, which the loop's own walk blurs."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        other: OSError | None = None
        for *_, address in found:
            try:
                await loop.create_connection(lambda: self._connection, str(address[0]), target.port)
            except ConnectionRefusedError:
                continue
            except OSError as error:
                other = error
            else:
                return
        raise other or ConnectionRefusedError

    def _open(self, welcome: Welcome) -> None:
        if self._welcomed.done():
            raise ProtocolViolation("a second Welcome")
        _check(welcome.card)
        self._num_ranks = max(1, welcome.card.data_parallel_size)
        self._blocks = BlockInbox(num_blocks=welcome.card.num_kv_blocks * self._num_ranks)
        self._welcomed.set_result(welcome)
        self._connection.start_heartbeat()

    def _take_loads(self, loads: Sequence[WorkerLoad]) -> None:
        if len(loads) != self._num_ranks:
            raise ProtocolViolation(f"the load of {len(loads)} ranks where the worker has {self._num_ranks}")
        self.loads = loads
        if self._on_loads is not None:
            self._on_loads(loads)

    def _take_blocks(self, change: KvChange) -> None:
        if len(change.stored) % 8 or len(change.removed) % 8:
            raise ProtocolViolation("KV blocks that are not whole ids")
        if change.rank not in range(self._num_ranks):
            raise ProtocolViolation("KV blocks of a rank that the worker does not have")
        if not self._blocks.receive(change):
            self._connection.send(ResyncBlocks())
        self._give_soon()

    def _give_soon(self) -> None:
        if self._giving is None and self._on_blocks is not None and len(self._blocks):
            self._giving = asyncio.get_running_loop().call_soon(self._give_blocks)

    def _give_blocks(self) -> None:
        """One part only: the loop does other things before the next."""
        self._giving = None
        change = self._blocks.take()
        if change is not None and self._on_blocks is not None:
            self._on_blocks(change)
            self._give_soon()

    def _send(self, request: EngineRequest, on_sent: Callable[[str], None]) -> None:
        if self.closed.is_set():
            raise WorkerLost("the worker was lost before the request was sent")
        if len(self._requests) >= self._config.max_in_flight:
            raise NoWorkerReady("the worker has as many requests as it may have")
        num_waiting_bytes = sum(outgoing.num_bytes_left for outgoing in self._outgoing.values())
        if self._connection.num_buffered_bytes + num_waiting_bytes > self._config.max_write_buffer_bytes:
            raise NoWorkerReady("the worker takes requests more slowly than they come")
        try:
            self._send_parts(request, on_sent)
        except ProtocolViolation:
            raise HandoverFailed("the request is larger than a message to a worker may be") from None

    def _send_parts(self, request: EngineRequest, on_sent: Callable[[str], None]) -> None:
        """Raises ProtocolViolation, having sent nothing, if the request is larger than allowed."""
        request_id = request.request_id
        message, tensors = split(request)
        if not tensors:
            self._connection.send(Submit(request), at_once=True)
            on_sent(request_id)
            return

        def ended() -> None:
            del self._outgoing[request_id]
            on_sent(request_id)

        outgoing = OutgoingRequest(message, tensors, ended, max_bytes=self._config.max_frame_bytes)
        self._outgoing[request_id] = outgoing
        self._connection.send_in_pieces(outgoing)

    def _abort(self, request_id: str) -> None:
        if (outgoing := self._outgoing.get(request_id)) is not None:  # the worker does not know it yet
            outgoing.cancel()
            self._requests.pop(request_id).on_release()
        elif request_id in self._requests:
            self._connection.send(Abort(request_id))

    def _request(self, request_id: str) -> RemoteRequest:
        try:
            return self._requests[request_id]
        except KeyError:
            raise ProtocolViolation("an answer to a request that is not under way") from None


def _check(card: ModelCard) -> None:
    """Raise ProtocolViolation for sizes that no engine has: what is kept for a worker grows with them."""
    if not (
        0 < card.block_size <= _MAX_BLOCK_SIZE
        and 0 <= card.data_parallel_size <= _MAX_RANKS
        and 0 <= card.num_kv_blocks <= _MAX_KV_BLOCKS
        and card.encoder_cache_tokens >= 0
        and card.max_num_seqs >= 0
    ):
        raise ProtocolViolation("a worker's card with impossible sizes")


def _nothing(_request_id: str) -> None:
    """Nobody wants to know."""


def _refusal(error: MedialaneError) -> MedialaneError:
    """NoWorkerReady says that nobody listens; a worker that says so itself cannot mean that."""
    return WorkerLost(error.message) if isinstance(error, NoWorkerReady) else error
