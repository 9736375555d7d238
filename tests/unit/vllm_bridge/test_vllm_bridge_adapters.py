"""LoRA adapters of one engine: identified by their files, copied, refused if the files are others by now."""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from vllm.lora.request import LoRARequest

from medialane.types.errors import AdapterChanged, GenerationFailed, WorkerLost
from medialane.vllm_bridge.engine.adapters import Adapters, versioned
from waiting import eventually


class Engine:
    """Reads the weights of what it loads, and again before each use, as if it kept none."""

    def __init__(self):
        self.loaded = {}
        self.error = None

    async def load(self, lora):
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.loaded[lora.lora_int_id] = lora

    async def remove(self, number):
        await asyncio.sleep(0)
        del self.loaded[number]

    def weights(self, lora):
        return (Path(self.loaded[lora.lora_int_id].lora_path) / "adapter_model.safetensors").read_text()


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def adapters(engine, tmp_path):
    (tmp_path / "copies").mkdir()
    return Adapters(tmp_path / "copies", load=engine.load, remove=engine.remove)


@pytest.fixture
def copies(tmp_path):
    return lambda: len(list((tmp_path / "copies").iterdir()))


@pytest.fixture
def sql(tmp_path):
    return LoRARequest("sql", 7, write(tmp_path / "sql", "old"))


def write(folder, weights):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(weights)
    (folder / "optimizer.pt").write_text("large")
    return str(folder)


async def test_each_load_serves_the_files_as_they_are_then(adapters, engine, sql):
    old = versioned(sql, await adapters.add(sql))
    write(Path(sql.lora_path), "new")
    async with adapters.using(old) as used:
        assert engine.weights(used) == "old"
    new = versioned(sql, await adapters.add(sql))
    async with adapters.using(new) as used:
        assert engine.weights(used) == "new"
    assert new.lora_int_id != old.lora_int_id
    assert new.lora_name != old.lora_name


async def test_equal_files_are_one_version_wherever_and_whenever_they_are_read(adapters, engine, sql, copies, tmp_path):
    version = await adapters.add(sql)
    write(Path(sql.lora_path), "old")
    again = LoRARequest("sql", 9, write(tmp_path / "mounted elsewhere", "old"), load_inplace=True)
    assert await adapters.add(sql) == await adapters.add(again) == version
    assert len(engine.loaded) == copies() == 1
    assert versioned(again, version).load_inplace is False, "vLLM would read the files again in each step"
    other = msgspec.structs.replace(sql, lora_name="other")
    assert versioned(other, version).lora_int_id != versioned(sql, version).lora_int_id


async def test_id_fits_vllms_kernels(sql):
    assert all(0 < versioned(sql, f"{n:x}").lora_int_id < 1 << 31 for n in range(100))


async def test_version_depends_on_configuration_weights_and_how_they_are_read(adapters, sql):
    versions = {await adapters.add(sql), await adapters.add(msgspec.structs.replace(sql, is_3d_lora_weight=True))}
    (Path(sql.lora_path) / "adapter_config.json").write_text('{"r": 8}')
    versions.add(await adapters.add(sql))
    (Path(sql.lora_path) / "optimizer.pt").write_text("is not read")
    versions.add(await adapters.add(sql))
    assert len(versions) == 3


async def test_worker_that_was_not_there_loads_the_version_that_a_request_names(adapters, engine, sql, tmp_path):
    (tmp_path / "earlier").mkdir()
    version = await Adapters(tmp_path / "earlier", load=Engine().load, remove=engine.remove).add(sql)

    async def use():
        async with adapters.using(versioned(sql, version)) as used:
            return engine.weights(used)

    assert await asyncio.gather(*[use() for _ in range(5)]) == ["old"] * 5
    assert len(engine.loaded) == 1
    write(Path(sql.lora_path), "new")
    assert await use() == "old"


async def test_request_for_files_that_are_gone_or_others_is_refused(adapters, engine, sql, copies):
    lora = versioned(sql, "0123456789abcdef")
    with pytest.raises(AdapterChanged, match="'sql' have changed since it was loaded: load it again"):
        async with adapters.using(lora):
            pass
    os.remove(Path(sql.lora_path) / "adapter_config.json")
    with pytest.raises(GenerationFailed, match="'sql' cannot be loaded"):
        async with adapters.using(lora):
            pass
    assert engine.loaded == {}
    assert copies() == 0


async def test_unloading_waits_for_the_requests_that_use_the_adapter(adapters, engine, sql, copies):
    lora = versioned(sql, await adapters.add(sql))
    async with adapters.using(lora) as used:
        async with adapters.using(lora):
            await adapters.unload("sql")
        assert engine.weights(used) == "old"
    assert engine.loaded == {}
    assert copies() == 0
    await adapters.unload("sql")  # idempotent


async def test_request_keeps_its_answer_if_the_engine_fails_to_unload_behind_it(engine, sql, tmp_path):
    async def fail(_number):
        raise GenerationFailed("the engine failed a call of remove_lora")

    adapters = Adapters(tmp_path, load=engine.load, remove=fail)
    lora = versioned(sql, await adapters.add(sql))
    async with adapters.using(lora):
        await adapters.unload("sql")
    await adapters.add(sql)
    with pytest.raises(GenerationFailed):
        await adapters.unload("sql")


async def test_unloading_keeps_other_adapters_and_the_version_that_replaced_it(adapters, engine, sql, tmp_path):
    other = LoRARequest("other", 1, write(tmp_path / "other", "other"))
    await adapters.add(other)
    old = versioned(sql, await adapters.add(sql))
    write(Path(sql.lora_path), "new")
    version = await adapters.add(sql)
    await adapters.unload("sql", keep=version)
    assert set(map(engine.weights, engine.loaded.values())) == {"other", "new"}
    async with adapters.using(old) as used:  # of another gateway, which does not know the new version
        assert engine.weights(used) == "new"
    with pytest.raises(AdapterChanged):
        async with adapters.using(old, exact=True):
            pass
    await adapters.unload("sql")
    with pytest.raises(AdapterChanged):
        async with adapters.using(old):
            pass


async def test_adapter_that_is_loaded_again_while_it_is_unloaded_stays(adapters, engine, sql):
    lora = versioned(sql, await adapters.add(sql))
    async with adapters.using(lora):
        await adapters.unload("sql")
        await adapters.add(sql)
    async with adapters.using(lora) as used:
        assert engine.weights(used) == "old"


async def test_files_that_are_being_written_are_not_loaded(adapters, engine, sql, copies):
    weights = Path(sql.lora_path) / "adapter_model.safetensors"
    with weights.open("wb") as file:
        file.truncate(1 << 30)  # sparse: takes a moment to read
    loading = asyncio.create_task(adapters.add(sql))
    copied = "copies/*/adapter_model.safetensors"
    await eventually(lambda: list(weights.parents[1].glob(copied)), "its weights are being read", 10)
    os.utime(weights)
    with pytest.raises(GenerationFailed, match="change while they are read"):
        await loading
    assert copies() == 0


async def test_unloadable_adapter_fails_its_requests_and_is_retried(adapters, engine, sql, copies):
    engine.error = GenerationFailed("no such module")
    with pytest.raises(GenerationFailed, match="no such module"):
        await adapters.add(sql)
    assert copies() == 0
    engine.error = None
    lora = versioned(sql, await adapters.add(sql))
    async with adapters.using(lora) as used:
        assert engine.weights(used) == "old"


async def test_request_without_an_adapter_needs_none(adapters):
    async with adapters.using(None) as used:
        assert used is None


async def test_dead_engine_is_reported_as_lost(adapters, engine, sql):
    engine.error = WorkerLost("the worker's engine has died")
    with pytest.raises(WorkerLost):
        await adapters.add(sql)


async def test_engine_on_several_hosts_reads_the_path_itself(engine, sql, tmp_path):
    adapters = Adapters(tmp_path, load=engine.load, remove=engine.remove, reads_path=True)
    version = await adapters.add(sql)
    async with adapters.using(versioned(sql, version)) as used:
        assert used.lora_path == sql.lora_path
