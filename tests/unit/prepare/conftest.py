"""A real arena with encoded media in it; a test that leaves a lease or a reservation fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from preparer_pools import png, put

from builders import checked_arena
from medialane.arena import Arena, Lease
from medialane.types.media import EncodedMedia


@pytest.fixture
def arena() -> Iterator[Arena]:
    with checked_arena(32 << 20) as arena:
        yield arena


@pytest.fixture
def encoded(arena: Arena) -> Iterator[Lease[EncodedMedia]]:
    with put(arena, png()) as lease:
        yield lease
