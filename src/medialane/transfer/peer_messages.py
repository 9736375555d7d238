"""Messages between the stores of two hosts, over TCP connections that each serve one entry at a time.

    destination (connects)          source (listens)
    PeerHello               ->
                            <-      PeerWelcome, or PeerRefused and the end of the connection
    OpenEntry(entry)        ->                              check the capability, and hold the entry
                            <-      EntryOpened(value, offers)
    SendPayload(start,stop) ->                              once, unless another mover copies the entry; it may be sent
                                                            with OpenEntry, and is ignored if that is refused
                            <-      these bytes of the payload, without a frame
    CloseEntry              ->                              the payload is received: release the entry
                            <-      EntryClosed             it was held until now, so what was received is valid
                            <-      PeerRefused(error)      instead of EntryOpened; the connection stays usable

A large entry is copied over several connections: each opens it and asks for a part of the payload, which is
`range.nbytes` less the entry's header.

The source ends a hold that lasts too long by closing the connection, and then the destination gets no EntryClosed. Any
other error closes the connection, too: nothing is received from it afterwards. How long a pull may take is known to
both sides: a peer that is stopped or unreachable must not delay a request for much longer than its fallback takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from medialane.types.errors import ErrorReport
from medialane.types.feature import MAX_HEADER_BYTES, Feature, RemoteEntry
from medialane.types.media import EncodedMedia
from medialane.wire.connection import checked

#: Must be equal on both sides; incremented by every incompatible change.
PEER_VERSION = 2

#: Name of the protocol in the handshake that authenticates both sides (`wire.authentication`).
PROTOCOL = "pull"

#: Largest message before and after the peer is authenticated.
MAX_HELLO_BYTES = 4096
MAX_MESSAGE_BYTES = MAX_HEADER_BYTES + (1 << 20)


#: Movers of a store; there are two.
MAX_OFFERS = 8


class PeerHello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`arena` is the connecting store's."""

    arena: str
    version: int = PEER_VERSION


class PeerWelcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The source's arena."""

    arena: str


class PeerRefused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    error: ErrorReport


class OpenEntry(msgspec.Struct, frozen=True, array_like=True, tag=True):
    entry: RemoteEntry


class EntryOpened(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`encoded` for encoded bytes, otherwise `feature`, which has an embedding for an embedded entry; their ranges are
    in the source's arena. `offers` is what its movers offer at the moment (`mover.py`), by name."""

    feature: Feature | None = None
    encoded: EncodedMedia | None = None
    offers: Annotated[dict[str, bytes], Meta(max_length=MAX_OFFERS)] = {}


class SendPayload(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Bytes `start` to `stop` of the payload."""

    start: int
    stop: int


class CloseEntry(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class EntryClosed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


ToSource = PeerHello | OpenEntry | SendPayload | CloseEntry
FromSource = PeerWelcome | PeerRefused | EntryOpened | EntryClosed

#: The decoders raise ProtocolViolation.
decode_to_source: Callable[[bytes], ToSource] = checked(msgspec.msgpack.Decoder(ToSource).decode)
decode_from_source: Callable[[bytes], FromSource] = checked(msgspec.msgpack.Decoder(FromSource).decode)


#: For the start of a pull, on a busy machine.
_BASE_S = 5.0
#: The slowest link that is worth using: a network of 100 Mbit/s.
_MIN_BYTES_PER_S = 10e6


def longest_pull_s(nbytes: int) -> float:
    """Return the destination's deadline for a pull, in seconds."""
    return _BASE_S + nbytes / _MIN_BYTES_PER_S


def longest_hold_s(nbytes: int) -> float:
    """Return how long the source holds an entry for a pull, in seconds: longer than any pull of it."""
    return 2 * longest_pull_s(nbytes)
