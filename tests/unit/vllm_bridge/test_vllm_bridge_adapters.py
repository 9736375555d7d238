"""LoRA adapters new to a worker."""

import pytest
from vllm.lora.request import LoRARequest

from medialane.core.errors import GenerationFailed, WorkerLost
from medialane.vllm_bridge.engine.adapters import LoadedAdapters

SQL = LoRARequest("sql", 7, "/adapters/sql")


class Engine:
    def __init__(self):
        self.loaded = []
        self.error = None

    async def load(self, lora):
        if self.error is not None:
            raise self.error
        self.loaded.append(lora.lora_path)


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def adapters(engine):
    return LoadedAdapters(engine.load, capacity=2)


async def test_adapter_is_loaded_once_before_its_first_request(adapters, engine):
    for _ in range(3):
        await adapters.ensure(SQL)
        await adapters.ensure(None)
    assert engine.loaded == ["/adapters/sql"]


async def test_adapter_from_another_place_is_another_adapter(adapters, engine):
    await adapters.ensure(SQL)
    await adapters.ensure(LoRARequest("sql", 8, "/adapters/new"))
    assert engine.loaded == ["/adapters/sql", "/adapters/new"]


async def test_adapter_that_may_be_evicted_is_checked_before_each_request(adapters, engine):
    """Its folder may be gone: the engine would crash when it loads it again."""
    for name in ("one", "two", "three"):
        await adapters.ensure(LoRARequest(name, ord(name[1]), f"/adapters/{name}"))
    engine.error = GenerationFailed("the engine failed a call of add_lora")
    with pytest.raises(GenerationFailed, match="'one' cannot be loaded"):
        await adapters.ensure(LoRARequest("one", ord("n"), "/adapters/one"))


async def test_unloadable_adapter_fails_its_requests_and_is_retried(adapters, engine):
    engine.error = GenerationFailed("the engine failed a call of add_lora")
    with pytest.raises(GenerationFailed, match="'sql' cannot be loaded"):
        await adapters.ensure(SQL)
    engine.error = None
    await adapters.ensure(SQL)
    assert engine.loaded == ["/adapters/sql"]


async def test_dead_engine_is_reported_as_lost(adapters, engine):
    engine.error = WorkerLost("the worker's engine has died")
    with pytest.raises(WorkerLost):
        await adapters.ensure(SQL)
