"""Transports from gateway to worker, and the order in which transfer paths are tried."""

from medialane.transfer.config import TransferConfig
from medialane.transfer.transport import (
    InlineReceiver,
    InlineTransport,
    Receiver,
    ShmReceiver,
    ShmTransport,
    TransferPath,
    TransferTensors,
    Transport,
    TransportChoice,
    transfer_paths,
)

__all__ = [
    "InlineReceiver",
    "InlineTransport",
    "Receiver",
    "ShmReceiver",
    "ShmTransport",
    "TransferConfig",
    "TransferPath",
    "TransferTensors",
    "Transport",
    "TransportChoice",
    "transfer_paths",
]
