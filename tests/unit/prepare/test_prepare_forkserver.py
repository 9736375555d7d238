import asyncio
import os

import pytest
from preparer_pools import children, make_pool

from medialane.media import MediaConfig
from medialane.prepare import PrepareConfig, PreparerPool
from medialane.prepare.forkserver import load_factory
from medialane.testing.fake_processor import build_processor
from medialane.types.errors import StartupFailed
from waiting import eventually


def test_factory_is_found_by_module_and_function():
    assert load_factory("medialane.testing.fake_processor:build_processor") is build_processor


@pytest.mark.parametrize(
    "name",
    [
        "no_such_module:f",
        "medialane.testing.fake_processor:no_such_function",
        "medialane.testing.fake_processor:PATCH_SIDE",
        "medialane",
    ],
)
def test_missing_factory_is_rejected_by_name(name):
    with pytest.raises(StartupFailed, match=name):
        load_factory(name)


async def test_pool_with_an_unknown_factory_reports_it(arena):
    config = PrepareConfig(num_preparers=1)
    pool = PreparerPool(
        config, factory="nowhere:f", factory_config=b"", arena=arena, media=MediaConfig(), environment=os.environ
    )
    with pytest.raises(StartupFailed, match="nowhere:f"):
        await pool.start()
    assert not children()


async def test_close_during_processor_construction_stops_it(arena):
    pool = make_pool(arena, b'{"warm_s": 30}')
    starting = asyncio.create_task(pool.start())
    await eventually(lambda: bool(children()))
    await pool.close()
    with pytest.raises(StartupFailed, match="closed"):
        await starting
    assert not children()


async def test_cancelled_start_leaves_no_process(arena):
    pool = make_pool(arena, b'{"warm_s": 30}')
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await pool.start()
    assert not children()
