"""RPC messages between gateway and worker.

Either the worker listens and the gateway connects, or the gateway listens, and the worker connects and sends Join, to
which the gateway may reply Refused and close the connection. Then, in both cases, the gateway sends Hello. The worker
replies Refused and closes the connection, or Welcome: that also guarantees that the requests of the gateway's earlier
connections have ended. Before Welcome the gateway sends nothing else. Afterwards:

    gateway                         worker
    Submit(request)         ->                                  after Payload and raw frames, if with_payload
                            <-      Output(delta) ...           any number, the last one `finished`
                            <-      Failed(request_id, error)   instead of the finished Output
                            <-      Released(request_id)        always, last: the request's media are no longer read
    Abort(request_id)       ->                                  followed by Released, soon
    Ping(n)                 ->                                  every heartbeat interval
                            <-      Pong(n)
                            <-      LoadReport(loads)           every heartbeat interval, and when it changed
                            <-      ArenaMapped(arena)          after Welcome, and when it changed

    Pending(number, work)   ->                                  after a request was sent, if there are other gateways,
                                                                which get it with another number
    PendingEnded(number)    ->                                  its first token or its end
                            <-      Gateways(count)             registered ones, when it changed and was or is above 1

                            <-      KvBlocks(change)            all blocks after Welcome, then batched changes
    ResyncBlocks            ->                                  followed by all blocks

    Administer(id, call)    ->                                  executed concurrently with requests
                            <-      EncoderCleared              before AdminDone, to all gateways, if it did that
                            <-      AdminDone(id, result), or AdminFailed(id, error)
    Drain                   ->                                  an operator wants the worker to stop
    ReadMetrics             ->                                  one at a time
                            <-      MetricValues(changes) ...   changes since the last read, the last one not `more`

    Payload(sizes)          ->                                  the tensors of the next Submit with_payload follow
    DropPayload             ->                                  that request was cancelled; drop its tensors

Outputs of different requests interleave freely. A request whose content cannot be decoded gets Failed and Released. Any
other frame that is not one of these messages closes the connection, which fails its requests and makes the worker
release them, and end their pending work at the other gateways. Inline tensors are sent in raw frames before their
request (`payload`).
"""

from __future__ import annotations

import msgspec

from medialane.types.admin import AdminCall, AdminResult
from medialane.types.errors import ErrorReport, ProtocolViolation
from medialane.types.kv_blocks import KvChange
from medialane.types.request import EncoderCard, EngineRequest, ModelCard, OutputDelta, WorkerLoad
from medialane.types.stats import MetricChanges, PendingWork
from medialane.wire.connection import UNREADABLE, other_version

#: Must be equal on both sides; incremented by every incompatible change.
PROTOCOL_VERSION = 15


class Join(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Sent first by a worker that has connected to a gateway. `name` identifies it for operators; `worker_id` and
    `card` are from its Welcome."""

    version: int = PROTOCOL_VERSION
    name: str
    worker_id: str
    card: ModelCard


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Registration of a gateway. `gateway_id` is unique per gateway; `processor` are its processor settings;
    `join_ports` are the ports at which workers join the gateways of its host."""

    version: int = PROTOCOL_VERSION
    gateway_id: str
    processor: dict[str, str] = {}
    join_ports: list[int] = []

    def __repr__(self) -> str:
        return f"Hello({self.gateway_id}, version={self.version})"


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request: EngineRequest
    with_payload: bool = False


class Payload(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Announces tensors of these sizes, which follow in raw frames, one after the other."""

    sizes: list[int]


class DropPayload(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The payload's request was cancelled."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    n: int


class ResyncBlocks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The gateway has missed changes of KV blocks and needs snapshots."""


class Administer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    call_id: int
    call: AdminCall


class ReadMetrics(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sent when the gateway's /metrics is scraped."""


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An operator wants the worker to stop, as with SIGTERM. It reports that it drains to all its gateways."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Registration succeeded. `worker_id` is unique per run of the worker; `store_client` names the worker at the store
    of its host, and is empty without one."""

    worker_id: str
    pid: int
    card: ModelCard
    store_client: str = ""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to Hello or to Join."""

    error: ErrorReport


class Output(msgspec.Struct, frozen=True, array_like=True, tag=True):
    delta: OutputDelta


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    error: ErrorReport


class Released(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str


class ArenaMapped(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The arena of the worker's host that it has mapped, so that it reads entries that are sent as descriptors."""

    arena: str | None


class LoadReport(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The load of each data-parallel rank of the worker, in order. If it `is_stalled`, its engine hangs; if it
    `has_unknown_blocks`, its KV blocks cannot be compared with prompts, and it reports none; if it
    `has_failing_tasks`, background tasks that must live have ended lately, and were started again. If it `is_draining`,
    it refuses new requests (WorkerDraining), and closes the connection when the running ones have ended, or are failed
    with that error, after its timeout."""

    loads: tuple[WorkerLoad, ...]
    is_stalled: bool = False
    has_unknown_blocks: bool = False
    has_failing_tasks: bool = False
    is_draining: bool = False


class KvBlocks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A snapshot's piece or a change, small enough to be applied in one iteration of the event loop."""

    change: KvChange


class Pending(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request sent to the worker, in both directions: announced by its gateway, and relayed to the others. `number`
    identifies it on this connection, in this direction."""

    number: int
    work: PendingWork


class PendingEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request has its first token (`is_computed`), or has ended without one."""

    number: int
    is_computed: bool


class Gateways(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The number of gateways that are registered with the worker. 1 until reported."""

    count: int


class EncoderCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An administrative call of any gateway has emptied the encoder caches of all ranks. `encoder` replaces that of the
    worker's card: embeddings of the earlier one are not loaded any more."""

    encoder: EncoderCard | None = None


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
    """The decodable fields of a Submit whose request cannot be decoded: its id, to report the error."""

    class Request(msgspec.Struct, frozen=True):
        request_id: str

    request: Request
    with_payload: bool = False


ReportRequest = ResyncBlocks | Pending | PendingEnded
Command = Administer | ReadMetrics | Drain
ToWorker = Hello | Refused | Submit | Payload | DropPayload | Abort | Ping | Command | ReportRequest

Report = LoadReport | ArenaMapped | KvBlocks | Pending | PendingEnded | Gateways | EncoderCleared
FromWorker = (
    Join | Welcome | Refused | Output | Failed | Released | Pong | AdminDone | AdminFailed | MetricValues | Report
)

_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_UNREADABLE_SUBMIT = msgspec.msgpack.Decoder(UnreadableSubmit)


def decode_to_worker(frame: memoryview) -> ToWorker | UnreadableSubmit:
    """Decode a gateway's message. Raises ProtocolViolation."""
    try:
        return _TO_WORKER.decode(frame)
    except UNREADABLE as error:
        if (version := other_version(frame, "Hello", PROTOCOL_VERSION)) is not None:
            return Hello(version=version, gateway_id="")
        try:
            return _UNREADABLE_SUBMIT.decode(frame)
        except UNREADABLE:
            raise ProtocolViolation(f"unreadable message: {error}") from error


def decode_from_worker(frame: memoryview) -> FromWorker:
    """Decode a worker's message. Raises ProtocolViolation."""
    try:
        return _FROM_WORKER.decode(frame)
    except UNREADABLE as error:
        if (version := other_version(frame, "Join", PROTOCOL_VERSION)) is not None:
            return Join(version=version, name="", worker_id="", card=ModelCard("", 0, 0, {}))
        raise ProtocolViolation(f"unreadable message: {error}") from error
