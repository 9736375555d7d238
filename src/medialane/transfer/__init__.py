"""How features get from the gateway to a worker: the transports, and the order to try them in."""

from medialane.transfer.config import TransferConfig
from medialane.transfer.selection import TransportChoice, Way, ways
from medialane.transfer.transport import (
    HandedTensors,
    InlineReceiver,
    InlineTransport,
    Receiver,
    ShmReceiver,
    ShmTransport,
    Transport,
)

__all__ = [
    "HandedTensors",
    "InlineReceiver",
    "InlineTransport",
    "Receiver",
    "ShmReceiver",
    "ShmTransport",
    "TransferConfig",
    "Transport",
    "TransportChoice",
    "Way",
    "ways",
]
