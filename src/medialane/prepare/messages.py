"""Control and job protocols between store, fork server and preparers, and their framing.

Theory of operation. There are two kinds of channel, both unnamed Unix socket pairs.

*Control*, store <-> fork server, SOCK_SEQPACKET: one packet is one msgpack message, and a packet may carry one file
descriptor (SCM_RIGHTS). Closing the channel terminates the fork server and all its preparers; the spare has its own
channel.

    store                         fork server
    Setup ----------------------> imports, builds and warms the processor, unless it was forked with one
          <---------------------- Ready | SetupFailed (and it exits)
    Fork + job socket ----------> forks
          <---------------------- Forked + pidfd | ForkFailed
          <---------------------- Exited, when a preparer has exited and been reaped
    Fork (of SPARE) + control socket -> forks another fork server, with this control channel
          <---------------------- Forked + pidfd | ForkFailed

*Jobs*, store <-> one preparer, SOCK_STREAM: msgpack messages in frames (`wire.connection`). A preparer keeps a job's
tensors until FreeTensors; the store may send the next job before that.

    store                         preparer
          <---------------------- PreparerReady, once: it has mapped the arena and confined itself
    ProcessItem ----------------> decodes, processes
          <---------------------- NeedRange | JobFailed
    FreeTensors ----------------> frees its tensors: the store has copied them, or has no space

If the kernel does not let the store read a preparer's memory, the preparer copies (Range instead of FreeTensors):

    Range ----------------------> copies its tensors into the range
          <---------------------- Done | JobFailed

    OpenItem -------------------> opens the item without decoding it: for its size, or a document's pages and their text
          <---------------------- ItemOpened | JobFailed
    DescribeBlank --------------> processes a blank of this size
          <---------------------- BlankDescribed | JobFailed

Tensors never pass through either channel: encoded bytes and results are in the arena.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from medialane.media import MediaConfig
from medialane.prepare.processor import Described
from medialane.prepare.sandbox import Sandbox
from medialane.types.errors import ErrorReport, PreparationFailed, ProtocolViolation
from medialane.types.feature import MAX_HEADER_BYTES, Header
from medialane.types.media import DocumentOptions, EncodedMedia, MediaSize, Modality, OpenedDocument
from medialane.types.tensor import MAX_TENSORS, ArenaRange, ByteCount, TensorSpec
from medialane.wire.connection import append_frame

#: Below the kernel's default send buffer (212 992), so that a packet is never split.
MAX_CONTROL_BYTES = 128 * 1024

#: Allowance for the rest of a message: tensor specs, sizes, options (bounded at intake), some thousand pages.
_OTHER_BYTES = 512 * 1024

#: The largest valid message is a NeedRange with the largest header; a larger frame is a protocol violation.
MAX_FRAME_BYTES = MAX_HEADER_BYTES + _OTHER_BYTES

#: Read at once: all of most messages.
READ_BYTES = 64 * 1024


class PreparerSetup(msgspec.Struct, frozen=True):
    """Settings of every preparer of a pool. `memory_limit_bytes` is added to its initial size; 0 means no limit.
    `slot` is the store's in the arena: preparers that write there have its lock, too."""

    arena: str
    arena_directory: str
    slot: int
    media: MediaConfig
    memory_limit_bytes: int


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message to a fork server. `factory_config` is opaque here; the factory decodes it. `environment` is for
    a fork server that was forked with a built processor; one that was exec'ed has it already."""

    factory_config: bytes
    preparer: PreparerSetup
    environment: dict[str, str] = {}


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a preparer; the attached descriptor is its end of the job channel. With the id SPARE, fork another, equally
    warm fork server; the descriptor is its end of its control channel.

    With `writes_arena` it copies its tensors to the arena itself, because the store cannot read its memory.
    """

    preparer_id: int
    writes_arena: bool = False


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The processor is warm, after `warm_s` seconds.

    `sandbox` is the sandbox of its preparers, `settings` are its processor's. `probe` is the address of the
    arena's id in its memory: the pool tries to read it to find out whether it may.
    """

    warm_s: float
    sandbox: Sandbox
    probe: int
    settings: dict[str, str] = {}


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A sign of life, every second, from when it is ready (`runtime.heartbeat`)."""


class SetupFailed(msgspec.Struct, frozen=True, tag=True):
    """The fork server exits because of an error that the operator must fix."""

    message: str


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The preparer, or the spare fork server, is running; its pidfd is attached."""

    preparer_id: int
    pid: int


class ForkFailed(msgspec.Struct, frozen=True, tag=True):
    """The kernel refused another process."""

    preparer_id: int
    message: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """The preparer has exited; `status` is from os.waitstatus_to_exitcode (negative: killed by that signal)."""

    preparer_id: int
    status: int


#: The spare fork server's `preparer_id`. Preparers are numbered from 1.
SPARE = 0

ControlRequest = Setup | Fork
ControlReport = Ready | Alive | SetupFailed | Forked | ForkFailed | Exited


class ProcessItem(msgspec.Struct, frozen=True, tag=True):
    """Decode and process one item. `io` is as in `MediaRef`, `options` are for the processor; both canonical JSON.

    Without `options` the item is only decoded; with `as_file` it is an image, and the tensor is a file of it.
    """

    job_id: int
    encoded: EncodedMedia
    io: bytes
    options: bytes | None
    as_file: bool = False


class OpenItem(msgspec.Struct, frozen=True, tag=True):
    """Open one item as its decoder would, without decoding it. With `io`, as in `MediaRef`, find out which size it has
    once it is decoded; with `pages`, the pages of a document that are wanted."""

    job_id: int
    encoded: EncodedMedia
    io: bytes | None = None
    pages: DocumentOptions | None = None


class DescribeBlank(msgspec.Struct, frozen=True, tag=True):
    """Find out the header of items of this size (`Processor.describe`)."""

    job_id: int
    modality: Modality
    size: MediaSize
    options: bytes


class Range(msgspec.Struct, frozen=True, tag=True):
    job_id: int
    range: ArenaRange


class FreeTensors(msgspec.Struct, frozen=True, tag=True):
    """The store has copied the job's tensors, or has no space for them."""

    job_id: int


class PreparerReady(msgspec.Struct, frozen=True, tag=True):
    pid: int


class NeedRange(msgspec.Struct, frozen=True, tag=True):
    """The item is processed; its tensors are at `addresses` in the preparer's memory and need a range of the arena."""

    job_id: int
    specs: Annotated[tuple[TensorSpec, ...], Meta(max_length=MAX_TENSORS)]
    addresses: Annotated[tuple[ByteCount, ...], Meta(max_length=MAX_TENSORS)]
    header: Header
    size: MediaSize
    decode_s: float
    process_s: float


class Done(msgspec.Struct, frozen=True, tag=True):
    """All tensors are in the range, at the offsets given by `arena.describe`."""

    job_id: int


class ItemOpened(msgspec.Struct, frozen=True, tag=True):
    """What was to be found out of the item, if anything was."""

    job_id: int
    size: MediaSize | None = None
    document: OpenedDocument | None = None


class BlankDescribed(msgspec.Struct, frozen=True, tag=True):
    """What items of the size have in common; None if their headers depend on their content."""

    job_id: int
    described: Described | None


class JobFailed(msgspec.Struct, frozen=True, tag=True):
    job_id: int
    report: ErrorReport


#: Requests that begin a job.
ItemRequest = ProcessItem | OpenItem | DescribeBlank
JobRequest = ItemRequest | Range | FreeTensors
JobReport = PreparerReady | NeedRange | Done | ItemOpened | BlankDescribed | JobFailed

#: The decoders raise msgspec.DecodeError.
decode_control_request: Callable[[bytes], ControlRequest] = msgspec.msgpack.Decoder(ControlRequest).decode
decode_control_report: Callable[[bytes], ControlReport] = msgspec.msgpack.Decoder(ControlReport).decode
decode_job_request: Callable[[bytes | memoryview], JobRequest] = msgspec.msgpack.Decoder(JobRequest).decode
decode_job_report: Callable[[bytes | memoryview], JobReport] = msgspec.msgpack.Decoder(JobReport).decode


def encode_frame(message: JobRequest | JobReport) -> bytearray:
    """Encode one frame. Raises PreparationFailed if its message exceeds MAX_FRAME_BYTES: only the job fails."""
    frame = bytearray()
    try:
        append_frame(frame, message, MAX_FRAME_BYTES)
    except ProtocolViolation as error:
        raise PreparationFailed(f"this item's {type(message).__name__} cannot be sent: {error.message}") from error
    return frame
