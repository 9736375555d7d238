"""Adapters as a gateway's requests know them: the version that workers have read, unloaded by vLLM's own endpoint."""

import asyncio
from types import SimpleNamespace

import pytest
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.lora.request import LoRARequest

from medialane.types.admin import AddLora, UnloadLora
from medialane.types.errors import AdminCallIncomplete, GenerationFailed, NotFound, NoWorkerReady
from medialane.vllm_bridge.frontend.engine_client import AdapterVersions
from medialane.vllm_bridge.seams.api_server import unload_adapters_by

SQL = LoRARequest("sql", 1, "/adapters/sql")


class Workers:
    """Two, which read `files`: a version each, or an error."""

    def __init__(self):
        self.files = ["v1", "v1"]
        self.error = None
        self.calls = []

    async def administer(self, call):
        self.calls.append(call)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return list(self.files) if isinstance(call, AddLora) else [None, None]


@pytest.fixture
def workers():
    return Workers()


@pytest.fixture
def versions(workers):
    return AdapterVersions(workers, lambda lora: lora.lora_path.encode())


async def test_requests_name_the_version_that_was_loaded(versions, workers):
    await versions.load(SQL)
    first = await versions.of(SQL)
    assert (first.lora_name, first.lora_path) == ("sql@v1", "/adapters/sql")
    workers.files = ["v2", "v2"]
    assert await versions.of(SQL) == first
    await versions.load(SQL)
    second = await versions.of(SQL)
    assert second.lora_name == "sql@v2"
    assert second.lora_int_id != first.lora_int_id
    assert workers.calls[-2:] == [AddLora(b"/adapters/sql"), UnloadLora("sql", "v2")]


async def test_adapter_of_the_command_line_is_loaded_once_with_its_first_requests(versions, workers):
    versions.load_later(SQL)
    assert workers.calls == []
    found = await asyncio.gather(*[versions.of(SQL) for _ in range(3)])
    assert [lora.lora_name for lora in found] == ["sql@v1"] * 3
    assert workers.calls == [AddLora(b"/adapters/sql"), UnloadLora("sql", "v1")]


async def test_its_failed_load_does_not_tell_clients_about_workers_and_is_retried(versions, workers):
    versions.load_later(SQL)
    workers.error = AdminCallIncomplete("1 of 2 workers executed the call; failed: tcp://10.0.0.7")
    with pytest.raises(GenerationFailed, match="'sql' cannot be loaded by the workers"):
        await versions.of(SQL)
    workers.error = NoWorkerReady("no worker is ready")
    with pytest.raises(NoWorkerReady):
        await versions.of(SQL)
    workers.error = None
    assert (await versions.of(SQL)).lora_name == "sql@v1"


async def test_workers_that_read_different_files_fail_the_load_and_keep_the_version_until_then(versions, workers):
    await versions.load(SQL)
    workers.files = ["v2", "v3"]
    with pytest.raises(AdminCallIncomplete, match="different files of the LoRA adapter 'sql' at /adapters/sql"):
        await versions.load(SQL)
    assert (await versions.of(SQL)).lora_name == "sql@v1"
    assert workers.calls[-1] == UnloadLora("sql", "v1")


async def test_request_behind_the_unloading_of_its_adapter_does_not_load_it_again(versions, workers):
    await versions.load(SQL)
    await versions.unload("sql")
    with pytest.raises(NotFound, match="`sql` has been unloaded"):
        await versions.of(SQL)
    assert workers.calls[-1] == UnloadLora("sql")


@pytest.fixture
def models(versions):
    """vLLM's own list of models, over an engine client with these versions."""

    async def add_lora(lora):
        await versions.load(lora)
        return True

    client = SimpleNamespace(model_config=None, renderer=None, input_processor=None, add_lora=add_lora)
    found = OpenAIServingModels(client, [BaseModelPath("base", "/model")])
    unload_adapters_by(SimpleNamespace(openai_serving_models=found), versions.unload)
    return found


async def test_workers_unload_what_vllms_app_unloads(models, workers):
    await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name="sql", lora_path="/adapters/sql"))
    answer = await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name="sql"))
    assert answer == "Success: LoRA adapter 'sql' removed successfully."
    assert workers.calls[-1] == UnloadLora("sql")
    again = await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name="sql"))
    assert isinstance(again, ErrorResponse)
    assert len(workers.calls) == 3


async def test_unloading_that_a_worker_fails_is_no_success_and_can_be_repeated(models, workers):
    await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name="sql", lora_path="/adapters/sql"))
    workers.error = AdminCallIncomplete("1 of 2 workers executed the call")
    with pytest.raises(AdminCallIncomplete):
        await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name="sql"))
    workers.error = None
    assert (await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name="sql"))).startswith("Success")
