"""What crosses the borders of the mover process: descriptors of readable memory, the messages of its store, and what it
needs of NIXL (`Agent`: implemented by `nixl_agent`, and by `tests/fake_nixl.py` without NIXL).

Descriptors are as NVIDIA Dynamo's `nixl_connect` exchanges them (ai-dynamo-runtime 1.6.1). The owner of memory sends
`RdmaMetadata` as JSON (`create_readable(...).metadata()` there); who receives it reads all descriptors in one transfer
(`begin_read`), and ends it with the notification, by which the owner knows that it may reuse the memory.

Messages go over an unnamed Unix socket pair (SOCK_SEQPACKET): one packet is one msgpack message.

    store                         mover process
    Start ----------------------> loads NIXL, maps the arena, registers all of it once
          <---------------------- Started | ReadRefused (and it exits)
    AddPeer --------------------> another host's agent; no reply: reads from an unknown one fail
    Read -----------------------> copies to the arena, in a thread
          <---------------------- ReadDone | ReadFailed: nothing is written to the destination any more
    Expect ---------------------> watches for a notification, until it arrives or Forget
          <---------------------- Notified
    RemovePeer -----------------> disconnects from an agent that no pending read uses

A read has no deadline here: the store stops waiting, and keeps the destination until the report arrives or the process
has exited. Closing the channel terminates the process.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, Protocol

import msgspec
import pybase64

from medialane.types.errors import TransferFailed
from medialane.types.tensor import ArenaRange

#: Of an agent with many network devices; a decompression bomb ends here.
MAX_AGENT_METADATA_BYTES = 96 * 1024

_MAX_DESCRIPTORS = 1024

_PREFIX = "b64:"

_DEVICE = re.compile(r"cpu|(cuda|xpu):(\d{1,4})")


class Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`size` bytes at `ptr` in the memory of an agent's process, or of the GPU `cuda:N`."""

    device: str
    ptr: int
    size: int

    def __post_init__(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(f"{self.device!r} is not a device: cpu, cuda:N or xpu:N")
        if not (0 < self.ptr < 1 << 64 and 0 < self.size < 1 << 63):
            raise ValueError("a descriptor of no memory")

    @property
    def memory_type(self) -> Literal["DRAM", "VRAM"]:
        """NIXL's name of the kind of memory."""
        return "DRAM" if self.device == "cpu" else "VRAM"

    @property
    def device_id(self) -> int:
        return int(self.device.partition(":")[2] or 0)


class RdmaMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A readable operation. `operation_kind` is 1: the receiver reads."""

    descriptors: Annotated[list[Descriptor], msgspec.Meta(min_length=1, max_length=_MAX_DESCRIPTORS)]
    nixl_metadata: str
    notification_key: str
    operation_kind: int = 1

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> RdmaMetadata:
        """Decode and validate JSON. Raises TransferFailed."""
        try:
            metadata = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise TransferFailed(f"invalid RDMA metadata: {error}") from error
        if metadata.operation_kind != 1:
            raise TransferFailed("the RDMA metadata is not of a readable operation")
        if not metadata.notification_key:
            raise TransferFailed("the RDMA metadata has no notification key")
        if len({descriptor.memory_type for descriptor in metadata.descriptors}) > 1:
            raise TransferFailed("the RDMA metadata describes memory of different kinds")
        return metadata

    def agent_metadata(self) -> bytes:
        """Return the metadata of the NIXL agent. Raises TransferFailed."""
        text = self.nixl_metadata
        try:
            packed = pybase64.b64decode(text[len(_PREFIX) :], validate=True) if text.startswith(_PREFIX) else None
            unpacker = zlib.decompressobj()
            agent_metadata = unpacker.decompress(
                bytes.fromhex(text) if packed is None else packed, MAX_AGENT_METADATA_BYTES
            )
        except (ValueError, zlib.error) as error:
            raise TransferFailed(f"invalid RDMA metadata: {error}") from error
        if not unpacker.eof:
            raise TransferFailed("the agent metadata is incomplete, or too large")
        return agent_metadata


def pack_agent_metadata(metadata: bytes) -> str:
    """Return the value of `RdmaMetadata.nixl_metadata`."""
    return _PREFIX + pybase64.b64encode(zlib.compress(metadata, 6)).decode()


class AgentError(Exception):
    """NIXL has refused or failed a call. The message is for logs."""


class Transfer(Protocol):
    def is_done(self) -> bool:
        """Return whether all bytes have arrived; False while they may still arrive. Raises AgentError if the transfer
        has failed: no byte arrives any more."""
        ...

    def release(self) -> None:
        """Free the transfer, which has ended. Raises RuntimeError if it may not have."""
        ...


class Agent(Protocol):
    """All methods may be called from several threads, and may block for as long as a copy takes."""

    def register(self, memory: Descriptor) -> None:
        """Let other agents, and `read`, access this memory until the process ends. Raises AgentError."""
        ...

    def metadata(self) -> bytes:
        """Return what other agents need to read the registered memory."""
        ...

    def add_peer(self, metadata: bytes) -> str:
        """Return the name of the agent that this is the metadata of. Raises AgentError."""
        ...

    def remove_peer(self, name: str) -> None:
        """Disconnect. Raises AgentError."""
        ...

    def read(
        self, peer: str, sources: Sequence[Descriptor], destinations: Sequence[Descriptor], notification: bytes
    ) -> Transfer:
        """Start to copy `sources` of `peer` to as many destinations of the same sizes in registered memory of this
        process, which is the host's.
        The peer gets `notification` afterwards, unless it is empty. Raises AgentError: no byte arrives any more;
        RuntimeError if they may."""
        ...

    def notifications(self) -> list[bytes]:
        """Return the notifications that have arrived since the last call."""
        ...


# Messages between store and mover process

#: Below the kernel's default send buffer (212 992), so that a packet is always sent whole.
MAX_PACKET_BYTES = MAX_AGENT_METADATA_BYTES + 32 * 1024


#: Reads in flight of one process, abandoned ones included: each occupies a thread there.
MAX_READS = 32


class Start(msgspec.Struct, frozen=True, tag=True):
    """`agent` is the name of the NIXL agent, unique to this process. `slot` is the store's in the arena: its lock shows
    the next store that this process may still write."""

    arena: str
    directory: str
    slot: int
    agent: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """`base` is the address of the arena's file in the process."""

    metadata: bytes
    base: int


class ReadRefused(msgspec.Struct, frozen=True, tag=True):
    """NIXL is missing, or cannot be used on this host."""

    message: str


class AddPeer(msgspec.Struct, frozen=True, tag=True):
    """`peer` is the store's name of the agent that this is the metadata of."""

    peer: str
    metadata: bytes


class RemovePeer(msgspec.Struct, frozen=True, tag=True):
    peer: str


class Read(msgspec.Struct, frozen=True, tag=True):
    """Copy `sources` of a peer to `offsets` of the arena's file, and send `notification` to the peer, if not empty.

    If `entry` is given, the header before the first source must be this entry's.
    """

    read_id: int
    peer: str
    sources: list[Descriptor]
    offsets: list[int]
    entry: ArenaRange | None = None
    notification: str = ""


class ReadDone(msgspec.Struct, frozen=True, tag=True):
    read_id: int


class ReadFailed(msgspec.Struct, frozen=True, tag=True):
    read_id: int
    message: str


class Expect(msgspec.Struct, frozen=True, tag=True):
    notification: str


class Forget(msgspec.Struct, frozen=True, tag=True):
    notification: str


class Notified(msgspec.Struct, frozen=True, tag=True):
    notification: str


ToMover = Start | AddPeer | RemovePeer | Read | Expect | Forget

FromMover = Started | ReadRefused | ReadDone | ReadFailed | Notified

#: The decoders raise msgspec.DecodeError.
decode_to_mover: Callable[[bytes], ToMover] = msgspec.msgpack.Decoder(ToMover).decode

decode_from_mover: Callable[[bytes], FromMover] = msgspec.msgpack.Decoder(FromMover).decode
