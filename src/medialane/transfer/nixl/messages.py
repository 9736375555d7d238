"""Messages between a store and its NIXL mover process, over an unnamed Unix socket pair (SOCK_SEQPACKET): one packet is
one msgpack message.

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

from collections.abc import Callable

import msgspec

from medialane.transfer.nixl.agent import MAX_AGENT_METADATA_BYTES, Descriptor
from medialane.types.tensor import ArenaRange

#: Below the kernel's default send buffer (212 992), so that a packet is always sent whole.
MAX_PACKET_BYTES = MAX_AGENT_METADATA_BYTES + 32 * 1024


#: Reads in flight of one process, those that were given up included: each occupies a thread there.
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

    If `entry` is given, the header before the first source must be that of this entry.
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
