"""How features get from the gateway to a worker: one protocol, one file per transport, and the order to try them in."""

from medialane.transfer.attachment import AttachedArenas
from medialane.transfer.config import TransferConfig
from medialane.transfer.inline import InlineReceiver, InlineTransport
from medialane.transfer.selection import TransportChoice, Way, ways
from medialane.transfer.shm import ShmReceiver, ShmTransport
from medialane.transfer.transport import HandedTensors, Receiver, Transport

__all__ = [
    "AttachedArenas",
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
