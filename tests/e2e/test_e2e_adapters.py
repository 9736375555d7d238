"""LoRA adapters whose files are replaced at their path, as trainers do: two workers beside plain vLLM."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
import pytest_asyncio
from medialane_process import FORKING_VLLM, ONE_PROCESS_ENGINE, MedialaneProcess, kill
from openai_http import OpenAiHttp, chat, picture, text
from shared_servers import SERVER_FLAGS, STORE_FLAGS

from adapter_files import FLAGS, write_adapter
from medialane.tools.check import plain_vllm as start_plain_vllm
from waiting import eventually

pytestmark = pytest.mark.vllm

VLLM_FLAGS = (*SERVER_FLAGS, *FLAGS)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NUM_PROMPTS = 6


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for seed in (1, 2, 3):
        write_adapter(folder / str(seed), seed)
    write_adapter(folder / "fixed", 3)
    return folder


@pytest.fixture(scope="module")
def served(tiny_model, vllm_environ, tmp_path_factory, files):
    runtime = Path(tempfile.mkdtemp(prefix="ml-e2e-"))
    process = MedialaneProcess.spawn(
        "serve",
        str(tiny_model),
        ["--workers", "2", *STORE_FLAGS],
        [*VLLM_FLAGS, "--lora-modules", f"fixed={files / 'fixed'}"],
        environ={
            **vllm_environ,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "XDG_RUNTIME_DIR": str(runtime),
            "VLLM_RPC_BASE_PATH": str(runtime),
        },
        log=tmp_path_factory.mktemp("serve") / "serve.log",
    )
    yield process
    process.stop()
    shutil.rmtree(runtime)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def right(served, tiny_model, vllm_environ, tmp_path_factory, files):
    """The answers of a fresh plain vLLM with the weights of each seed."""
    log = tmp_path_factory.mktemp("plain") / "server.log"
    modules = ["--lora-modules", *(f"{seed}={files / str(seed)}" for seed in (1, 2, 3))]
    flags = (*VLLM_FLAGS, ONE_PROCESS_ENGINE, *modules)
    async with start_plain_vllm(str(tiny_model), flags, environ=vllm_environ, log=log, program=FORKING_VLLM) as server:
        base_url = server.base_url.removesuffix("/v1")
        found = {seed: await answers(OpenAiHttp(base_url, str(seed))) for seed in (1, 2, 3)}
    assert found[1] != found[2] != found[3] != found[1]
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sql(served, right):
    await served.answers()
    await eventually(lambda: "Ctrl-C stops it" in served.log.read_text(), "all workers are ready", 200)
    return OpenAiHttp(served.base_url, "sql")


async def answers(client):
    """Answers to prompts that have nothing in common, at once, so that each worker gets some."""
    prompts = [chat(text(f"{n} " * 30), picture(90 + n)) for n in range(NUM_PROMPTS)]
    return [answer.ids for answer in await asyncio.gather(*map(client.succeed, prompts))]


async def answered_by(client):
    return (await client.metrics()).by("vllm:request_success_total", "worker").keys()


async def load(client, folder, **options):
    return await client.succeed({"lora_name": "sql", "lora_path": str(folder), **options}, LOAD)


@pytest.mark.timeout(600)
async def test_replaced_weights_answer_on_every_worker_as_in_a_fresh_plain_vllm(sql, served, right, files, tmp_path):
    folder = tmp_path / "sql"
    await load(sql, write_adapter(folder, 1))
    assert await answers(sql) == right[1]

    await sql.succeed({"lora_name": "sql"}, UNLOAD)
    assert (await sql.post(chat(text("hello")))).status == 404
    await load(sql, write_adapter(folder, 2))
    assert await answers(sql) == right[2]
    assert len(await answered_by(sql)) == 2
    assert await answers(sql) == right[2], "from the prefix cache"

    await load(sql, write_adapter(folder, 3), load_inplace=True)
    assert await answers(sql) == right[3]

    # An adapter of the command line, and a base model's request between: the engines keep one adapter.
    assert await answers(OpenAiHttp(sql.base_url, "fixed")) == right[3]
    write_adapter(folder, 1)
    assert await answers(sql) == right[3], "not loaded yet"

    worker = next(iter(served.named_workers()))
    kill(served.worker_pid(worker))
    assert await answers(sql) == right[3], "by the worker that still has it"
    await served.answers()


async def test_loading_what_is_not_there_changes_nothing(sql, tmp_path):
    failed = await sql.post({"lora_name": "none", "lora_path": str(tmp_path / "none")}, LOAD)
    assert failed.status == 404, failed.json
    assert (await sql.post({"lora_name": "none"}, UNLOAD)).status == 404
    assert "none" not in [model["id"] for model in (await sql.get("/v1/models")).json["data"]]


async def test_metrics_name_adapters_as_clients_do(sql):
    page = await sql.metrics()
    names = {s.labels["running_lora_adapters"] for s in page.samples if s.name == "vllm:lora_requests_info"}
    assert names
    assert not any("@" in name for name in names), names
