"""Copies entries between the arenas of hosts, by tcp or by another mover (`nixl`): `Pulls` is a store's end."""

from medialane.transfer.mover import Destination, Mover, OpenedEntry, StillWriting
from medialane.transfer.pulls import Pulls

__all__ = ["Destination", "Mover", "OpenedEntry", "Pulls", "StillWriting"]
