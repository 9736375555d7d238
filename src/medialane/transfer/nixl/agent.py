"""What the mover process needs of NIXL. Implemented by `nixl_agent`, and by `fake` without NIXL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from medialane.transfer.nixl.rdma_metadata import Descriptor


class AgentError(Exception):
    """NIXL has refused or failed a call. The message is for logs."""


class Segment(msgspec.Struct, frozen=True):
    """Memory of this process: `size` bytes at `ptr`."""

    ptr: int
    size: int


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
        self, peer: str, sources: Sequence[Descriptor], destinations: Sequence[Segment], notification: bytes
    ) -> Transfer:
        """Start to copy `sources` of `peer` to as many destinations of the same sizes in registered memory of the host.
        The peer gets `notification` afterwards, unless it is empty. Raises AgentError: no byte arrives any more;
        RuntimeError if they may."""
        ...

    def notifications(self) -> list[bytes]:
        """Return those that have arrived since the last call."""
        ...
