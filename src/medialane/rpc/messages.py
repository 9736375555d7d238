"""What a gateway and a worker say to each other.

The worker listens, the gateway connects, and opens with Hello. The worker answers Refused and hangs up, or Welcome:
that also promises that nothing of an earlier connection of the same gateway is read any more. Until Welcome the gateway
says nothing else. From then on

    gateway                         worker
    Submit(request)         ->                                  after Payload and raw frames, if with_payload
                            <-      Output(delta) ...           any number, the last one `finished`
                            <-      Failed(request_id, error)   instead of the finished Output
                            <-      Released(request_id)        always, last: nothing of the request is read any more
    Abort(request_id)       ->                                  answered by Released, soon
    Ping(n)                 ->                                  every heartbeat interval
                            <-      Pong(n)
                            <-      LoadReport(loads)           every heartbeat interval, and when it changed

                            <-      KvBlocks(change)            all blocks after Welcome, then changes, with pauses
    ResyncBlocks            ->                                  answered by all blocks

    Administer(id, call)    ->                                  when and as the worker has time
                            <-      AdminDone(id, result), or AdminFailed(id, error)
    ReadMetrics             ->                                  one at a time
                            <-      MetricValues(changes) ...   what has changed since the last, the last one not `more`

    Payload(sizes)          ->                                  the tensors of the next Submit with_payload follow
    DropPayload             ->                                  it does not come; what came of them is dropped

Answers of different requests interleave freely. A request whose content cannot be read is answered Failed and Released;
every other frame that is not one of these messages ends the connection, and the connection's end fails its requests and
makes the worker let them go. Tensors that travel by value come in raw frames before their request (`payload`).
"""

from __future__ import annotations

import msgspec

from medialane.core.admin import AdminCall, AdminResult
from medialane.core.errors import ErrorReport, ProtocolViolation
from medialane.core.kv_events import KvChange
from medialane.core.metrics import MetricChanges
from medialane.core.request import EngineRequest, ModelCard, OutputDelta, WorkerLoad

#: Both ends must speak the same one; a new version for every change that the other end must know about.
PROTOCOL_VERSION = 3


class ArenaOffer(msgspec.Struct, frozen=True, array_like=True):
    """The gateway's arena: a worker on the same host maps it and proves that by the nonce it reads there."""

    id: str
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Who connects. `gateway_id` is unique per gateway; `processor` are its processor settings; the client sends its
    configured token here."""

    version: int = PROTOCOL_VERSION
    gateway_id: str
    token: str = ""
    arena: ArenaOffer | None = None
    processor: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Hello({self.gateway_id}, version={self.version})"


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request: EngineRequest
    with_payload: bool = False


class Payload(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The bytes of so many tensors follow in raw frames, of these sizes, one after the other."""

    sizes: list[int]


class DropPayload(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request of the payload was given up."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    n: int


class ResyncBlocks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The gateway does not know any more which blocks are held."""


class Administer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int
    call: AdminCall


class ReadMetrics(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The gateway is being scraped."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What the worker is. `worker_id` is unique per incarnation of its process; `shm`: it maps the gateway's arena."""

    worker_id: str
    pid: int
    card: ModelCard
    shm: bool


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    error: ErrorReport


class Output(msgspec.Struct, frozen=True, array_like=True, tag=True):
    delta: OutputDelta


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    error: ErrorReport


class Released(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str


class LoadReport(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One for each data-parallel rank of the worker, in their order."""

    loads: tuple[WorkerLoad, ...]


class KvBlocks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A part of what the worker holds, small enough to be taken up at once."""

    change: KvChange


class AdminDone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int
    result: AdminResult


class AdminFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int
    error: ErrorReport


class MetricValues(msgspec.Struct, frozen=True, array_like=True, tag=True):
    changes: MetricChanges
    more: bool = False


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    n: int


class UnreadableSubmit(msgspec.Struct, frozen=True, array_like=True, tag="Submit"):
    """What can be read of a Submit whose request cannot: whom to tell."""

    class Request(msgspec.Struct, frozen=True):
        request_id: str

    request: Request
    with_payload: bool = False


ToWorker = Hello | Submit | Payload | DropPayload | Abort | Ping | ResyncBlocks | Administer | ReadMetrics
FromWorker = (
    Welcome
    | Refused
    | Output
    | Failed
    | Released
    | LoadReport
    | Pong
    | KvBlocks
    | AdminDone
    | AdminFailed
    | MetricValues
)

#: What msgspec raises for bytes that are not the message; RecursionError for an unknown field nested too deeply.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_UNREADABLE_SUBMIT = msgspec.msgpack.Decoder(UnreadableSubmit)


def decode_to_worker(frame: memoryview) -> ToWorker | UnreadableSubmit:
    """Read a gateway's message. Raises ProtocolViolation."""
    try:
        return _TO_WORKER.decode(frame)
    except _UNREADABLE as error:
        try:
            return _UNREADABLE_SUBMIT.decode(frame)
        except _UNREADABLE:
            raise ProtocolViolation(f"unreadable message: {error}") from error


def decode_from_worker(frame: memoryview) -> FromWorker:
    """Read a worker's message. Raises ProtocolViolation."""
    try:
        return _FROM_WORKER.decode(frame)
    except _UNREADABLE as error:
        raise ProtocolViolation(f"unreadable message: {error}") from error
