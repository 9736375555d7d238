"""What tests of several rooms build: a clock that they set, and an arena that must be empty in the end.

The fixtures `clock` and `arena` of conftest.py are these; `checked_arena` is for tests that need other settings.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from medialane.arena import Arena, ArenaConfig

MIB = 1 << 20

A = TypeVar("A", bound=Arena)


class Clock:
    """Stands still until a test sets `now`."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def bytes_beside_payload(arena: Arena) -> int:
    """What an entry without a description takes of an arena beside its payload."""
    writing_bytes = arena.stats().writing_bytes
    with arena.reserve(64):
        return arena.stats().writing_bytes - writing_bytes - 64


@contextmanager
def checked_arena(size_bytes: int = 16 * MIB, *, arena_type: type[A] = Arena, **settings: object) -> Iterator[A]:
    """A real arena. A test that leaves a pin or a reservation fails."""
    arena = arena_type.create(ArenaConfig(size_bytes=size_bytes, **settings))
    yield arena
    gc.collect()  # a traceback references frames, which reference views and pins of the arena
    stats = arena.stats()
    arena.close()
    assert (stats.num_leases, stats.num_reservations) == (0, 0)
