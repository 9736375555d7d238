"""Transports from gateway to worker, and the order in which transfer paths are tried."""

from medialane.transfer.config import TransferConfig
from medialane.transfer.mover import Destination, Mover, OpenedEntry, StillWriting
from medialane.transfer.mover_health import MoverHealth
from medialane.transfer.mover_speed import MoverSpeed
from medialane.transfer.tcp import TcpMover
from medialane.transfer.transport import (
    InlineReceiver,
    InlineTransport,
    PullTransport,
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
    "Destination",
    "InlineReceiver",
    "InlineTransport",
    "Mover",
    "MoverHealth",
    "MoverSpeed",
    "OpenedEntry",
    "PullTransport",
    "Receiver",
    "ShmReceiver",
    "ShmTransport",
    "StillWriting",
    "TcpMover",
    "TransferConfig",
    "TransferPath",
    "TransferTensors",
    "Transport",
    "TransportChoice",
    "transfer_paths",
]
