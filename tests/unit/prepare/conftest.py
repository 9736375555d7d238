"""A real arena with encoded media in it; a test that leaves a lease or a reservation fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from preparer_pools import png, put

from medialane.arena import Arena, ArenaConfig, Lease
from medialane.core.media import EncodedMedia


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(ArenaConfig(size_bytes=32 << 20))
    yield arena
    stats = arena.stats()
    arena.close()
    assert stats.num_leases == 0
    assert stats.num_reservations == 0


@pytest.fixture
def encoded(arena: Arena) -> Iterator[Lease[EncodedMedia]]:
    with put(arena, png()) as lease:
        yield lease
