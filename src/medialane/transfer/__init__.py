"""How features get from the gateway to a worker: the transports, and the order to try them in."""

from medialane.transfer.config import TransferConfig
from medialane.transfer.selection import TransferPath, TransportChoice, transfer_paths
from medialane.transfer.transport import (
    InlineReceiver,
    InlineTransport,
    Receiver,
    ShmReceiver,
    ShmTransport,
    TransferTensors,
    Transport,
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
