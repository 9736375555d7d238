"""What gateway, fork server and preparers say to each other, and how it is framed.

Theory of operation. There are two kinds of channel, both unix sockets that exist only between the two ends.

*Control*, gateway <-> fork server, SOCK_SEQPACKET: one packet is one msgpack message, and a packet may carry one file
descriptor (SCM_RIGHTS). The end of the channel is the end of the fork server and of all its preparers; its spare has a
channel of its own.

    gateway                       fork server
    Setup ----------------------> imports, builds and warms the processor
          <---------------------- Ready | Refused (and it ends)
    Fork + job socket ----------> forks
          <---------------------- Forked + pidfd | ForkFailed
          <---------------------- Exited, when a preparer has ended and is reaped
    ForkSpare + control socket -> forks another fork server, whose control channel that is
          <---------------------- SpareForked + pidfd | ForkFailed (preparer 0)

*Jobs*, gateway <-> one preparer, SOCK_STREAM: u32 little-endian length, then one msgpack message. One job at a time.

    gateway                       preparer
          <---------------------- Hello, once: it has mapped the arena and confined itself
    ProcessItem ----------------> decodes, processes
          <---------------------- NeedRange | JobFailed
    Copied | NoRange -----------> forgets its tensors: the gateway has copied them, or has no room

Where the kernel does not let the gateway read a preparer's memory, it asks for the copy instead of Copied:

    Range ----------------------> copies its tensors into the range
          <---------------------- Done | JobFailed

    ProbeItem ------------------> opens the item, decodes nothing
          <---------------------- Done | JobFailed

Tensors never pass through either channel: encoded bytes and results lie in the arena.
"""

from __future__ import annotations

import struct

import msgspec

from medialane.core.errors import ErrorReport, PreparationFailed
from medialane.core.feature import MAX_HEADER_BYTES
from medialane.core.media import EncodedMedia, MediaSize
from medialane.core.tensor import ArenaRange, TensorSpec
from medialane.media import MediaConfig
from medialane.prepare.sandbox import Sandbox

#: Below the kernel's default send buffer (212 992), so that a packet never has to be split.
MAX_CONTROL_BYTES = 128 * 1024

#: What a message may hold besides a header: tensor specs, sizes, options (bounded where they come in).
_OTHER_BYTES = 256 * 1024

#: The largest message that is ever due is a NeedRange with the largest header; a larger frame is a broken peer.
MAX_FRAME_BYTES = MAX_HEADER_BYTES + _OTHER_BYTES

LENGTH = struct.Struct("<I")


class PreparerSetup(msgspec.Struct, frozen=True):
    """What every preparer of a pool is given. `memory_limit_bytes` counts from its size at start; 0 is no limit."""

    arena: str
    arena_directory: str
    media: MediaConfig
    memory_limit_bytes: int


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message to a fork server. `factory_config` is the factory's own encoding."""

    factory_config: bytes
    preparer: PreparerSetup


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a preparer; the descriptor that comes along is its end of the job channel.

    One that `writes_arena` copies its tensors there itself; the gateway cannot read its memory.
    """

    preparer_id: int
    writes_arena: bool = False


class ForkSpare(msgspec.Struct, frozen=True, tag=True):
    """Fork a fork server, warm like this one; the descriptor that comes along is its end of its control channel."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The processor is warm; `warm_s` is what that took.

    `sandbox` is what its preparers are confined by. At `probe` in its memory stands the arena's id, which tells the
    gateway whether it may read there.
    """

    warm_s: float
    sandbox: Sandbox
    probe: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The fork server ends because the operator must change something."""

    message: str


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The preparer runs; its pidfd comes along."""

    preparer_id: int
    pid: int


class SpareForked(msgspec.Struct, frozen=True, tag=True):
    """The spare fork server runs; its pidfd comes along."""

    pid: int


class ForkFailed(msgspec.Struct, frozen=True, tag=True):
    """The kernel refused another process."""

    preparer_id: int
    message: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """The preparer has ended; `status` is as os.waitstatus_to_exitcode gives it (negative: killed by that signal)."""

    preparer_id: int
    status: int


#: In the place of a preparer's number: the spare fork server. Preparers are counted from 1.
SPARE = 0

ControlRequest = Setup | Fork | ForkSpare
ControlReport = Ready | Refused | Forked | SpareForked | ForkFailed | Exited


class ProcessItem(msgspec.Struct, frozen=True, tag=True):
    """Decode and process one item. `io` is as in `MediaRef`, `options` are the processor's; both canonical JSON.

    Without `options` the item is only decoded.
    """

    job_id: int
    encoded: EncodedMedia
    io: bytes
    options: bytes | None


class ProbeItem(msgspec.Struct, frozen=True, tag=True):
    """Open one item as its decoder would, without decoding it. The answer is Done or JobFailed."""

    job_id: int
    encoded: EncodedMedia


class Range(msgspec.Struct, frozen=True, tag=True):
    job_id: int
    range: ArenaRange


class Copied(msgspec.Struct, frozen=True, tag=True):
    job_id: int


class NoRange(msgspec.Struct, frozen=True, tag=True):
    job_id: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    pid: int


class NeedRange(msgspec.Struct, frozen=True, tag=True):
    """The item is processed; its tensors wait at `addresses` in the preparer's memory for room in the arena."""

    job_id: int
    specs: tuple[TensorSpec, ...]
    addresses: tuple[int, ...]
    header: bytes
    size: MediaSize
    decode_s: float
    process_s: float


class Done(msgspec.Struct, frozen=True, tag=True):
    """All tensors are in the range, at the offsets that `arena.describe` gives; or a probed item may be decoded."""

    job_id: int


class JobFailed(msgspec.Struct, frozen=True, tag=True):
    job_id: int
    report: ErrorReport


JobRequest = ProcessItem | ProbeItem | Range | Copied | NoRange
JobReport = Hello | NeedRange | Done | JobFailed

_ENCODER = msgspec.msgpack.Encoder()
_CONTROL_REQUESTS: msgspec.msgpack.Decoder[ControlRequest] = msgspec.msgpack.Decoder(ControlRequest)
_CONTROL_REPORTS: msgspec.msgpack.Decoder[ControlReport] = msgspec.msgpack.Decoder(ControlReport)
_JOB_REQUESTS: msgspec.msgpack.Decoder[JobRequest] = msgspec.msgpack.Decoder(JobRequest)
_JOB_REPORTS: msgspec.msgpack.Decoder[JobReport] = msgspec.msgpack.Decoder(JobReport)


def encode_control(message: ControlRequest | ControlReport) -> bytes:
    """One packet. Raises ValueError if it is over MAX_CONTROL_BYTES."""
    packet = _ENCODER.encode(message)
    if len(packet) > MAX_CONTROL_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(packet)} bytes is over the {MAX_CONTROL_BYTES} of a packet")
    return packet


def decode_control_request(packet: bytes) -> ControlRequest:
    """Raises msgspec.DecodeError, as do the other decoders here."""
    return _CONTROL_REQUESTS.decode(packet)


def decode_control_report(packet: bytes) -> ControlReport:
    return _CONTROL_REPORTS.decode(packet)


def encode_frame(message: JobRequest | JobReport) -> bytes:
    """One frame. Raises PreparationFailed if its message is over MAX_FRAME_BYTES: the job fails, not the channel."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        name = type(message).__name__
        raise PreparationFailed(f"this item's {name} message has {len(body)} bytes, more than {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


def frame_length(prefix: bytes) -> int:
    """Length of the message after this prefix. Raises ValueError if no frame may be that long."""
    (length,) = LENGTH.unpack(prefix)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return int(length)


def decode_job_request(body: bytes) -> JobRequest:
    return _JOB_REQUESTS.decode(body)


def decode_job_report(body: bytes) -> JobReport:
    return _JOB_REPORTS.decode(body)
