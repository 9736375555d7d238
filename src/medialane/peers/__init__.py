"""Copies entries between the arenas of hosts: which peers may, what they ask, and the two movers, tcp and nixl."""

from medialane.peers.mover import Destination, Mover, OpenedEntry, StillWriting
from medialane.peers.mover_health import MoverHealth
from medialane.peers.mover_speed import MoverSpeed
from medialane.peers.pulls import Pulls
from medialane.peers.tcp import TcpMover

__all__ = [
    "Destination",
    "Mover",
    "MoverHealth",
    "MoverSpeed",
    "OpenedEntry",
    "Pulls",
    "StillWriting",
    "TcpMover",
]
