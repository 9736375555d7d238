"""A store whose items are patterns of bytes, and what serves it."""

import pytest
from store_world import World


@pytest.fixture
async def world(monkeypatch):
    world = await World(monkeypatch).start()
    yield world
    await world.end()
