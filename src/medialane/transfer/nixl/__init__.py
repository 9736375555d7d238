"""The nixl mover: entries are read from another store's arena by NVIDIA NIXL (RDMA, or TCP without such a network).

NIXL runs in a process of its own beside the store (`process`), because UCX aborts its process on some failures of a
peer, and because only the end of the process stops a read for certain. `NixlMover` is the store's side.
"""

from medialane.transfer.nixl.agent import Descriptor, RdmaMetadata, pack_agent_metadata
from medialane.transfer.nixl.mover import NixlMover

__all__ = [
    "Descriptor",
    "NixlMover",
    "RdmaMetadata",
    "pack_agent_metadata",
]
