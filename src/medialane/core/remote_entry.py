"""Entries of other hosts' arenas."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from medialane.core.tensor import ArenaRange

#: The kind of an arena entry: encoded bytes as received, decoded media, processed features, outputs of the encoder.
EntryKind = Literal["encoded", "decoded", "processed", "embedded"]

#: What copies an entry from one store's arena to another's.
MoverName = Literal["nixl", "tcp"]
MoverChoice = Literal["auto", MoverName]


class Copied(NamedTuple):
    """The copy of another host's entry in this host's arena; `mover` is what has copied it, None if that is not known
    any more."""

    range: ArenaRange
    mover: MoverName | None


class RemoteEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The right to copy one entry of a store's arena, given by that store to a client that holds the entry.

    `range` is in the arena of the source, which is cached there under `kind` and `key`: equal keys mean equal content
    on every host. `address` is that of the source's peer listener. `capability` is checked by the source alone: its
    HMAC over range, kind, key and `expires_ms`, a time of the source's own monotonic clock, so that clocks of hosts are
    never compared. `mover` is the operator's choice.
    """

    range: ArenaRange
    kind: EntryKind
    key: str
    address: str
    expires_ms: int
    capability: bytes
    mover: MoverChoice = "auto"

    def __repr__(self) -> str:
        return f"RemoteEntry({self.kind} {self.key[:12]}, {self.range.nbytes} bytes at {self.address})"
