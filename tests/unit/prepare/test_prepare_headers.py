"""Items are measured, and blanks of a size described, by preparers: nothing is put into the arena."""

import json
import os
import signal

import pytest
from preparer_pools import make_pool, png, put, running

from medialane.prepare import Described
from medialane.types.errors import InvalidImage, PreparerCrashed, UnsupportedMediaType
from medialane.types.media import MediaSize


@pytest.fixture
def encoded(arena):
    with put(arena, png()) as pin:
        yield pin


def options(**wanted) -> bytes:
    return json.dumps(wanted).encode()


async def test_size_of_an_item_is_measured_and_its_header_is_that_of_a_blank(arena, encoded):
    async with running(make_pool(arena)) as pool:
        entries = arena.stats().num_entries
        size = await pool.measure(encoded)
        described = await pool.describe_blank("image", size, b"{}")
        assert arena.stats().num_entries == entries
        with await pool.prepare_item(encoded, b"{}", "a" * 64) as pin:
            feature = pin.value
    assert size == MediaSize(40, 30)
    assert described == Described(feature.header, feature.size)


async def test_header_that_depends_on_the_content_is_not_described(arena):
    async with running(make_pool(arena)) as pool:
        assert await pool.describe_blank("image", MediaSize(40, 30), options(by_content=True)) is None


async def test_errors_of_describing_and_measuring_are_those_of_preparing(arena):
    async with running(make_pool(arena)) as pool:
        with pytest.raises(InvalidImage):
            await pool.describe_blank("image", MediaSize(40, 30), options(fault="reject"))
        with pytest.raises(UnsupportedMediaType):
            await pool.describe_blank("video", MediaSize(40, 30, 2), b"{}")
        with put(arena, png()[:20]) as damaged, pytest.raises(InvalidImage):
            await pool.measure(damaged)
        assert arena.stats().num_leases == 0


async def test_blank_that_ends_preparers_is_refused_and_no_other(arena):
    kill, size = options(fault="kill"), MediaSize(40, 30)
    async with running(make_pool(arena)) as pool:
        for _ in range(2):
            with pytest.raises(PreparerCrashed):
                await pool.describe_blank("image", size, kill)
        with pytest.raises(PreparerCrashed, match="refused"):
            await pool.describe_blank("image", size, kill)
        assert (await pool.describe_blank("image", size, b"{}")).size == size


async def test_blank_of_a_preparer_that_dies_is_described_by_another(arena):
    async with running(make_pool(arena)) as pool:
        os.kill(pool.preparer_pids[0], signal.SIGKILL)
        assert (await pool.describe_blank("image", MediaSize(64, 48), b"{}")).size == MediaSize(64, 48)
