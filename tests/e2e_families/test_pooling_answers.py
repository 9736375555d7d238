"""Responses of a pooling model equal plain vLLM's, bit for bit, also with a LoRA adapter, and when the worker of a
request is killed."""

import asyncio
import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from adapter import RANK, write_adapter
from medialane_process import ONE_PROCESS_ENGINE, START_S, STOP_S, MedialaneProcess
from pooling_families import FAMILIES

from medialane.testing.tiny_model import cache_folder
from medialane.tools.check import plain_vllm
from medialane.tools.check.media import image, text
from waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

ADAPTER = "harbours"

MEDIALANE_FLAGS = ("--workers", "2", "--preparers", "1", "--arena-size", "256MiB", "--verbose")


def chat(*parts):
    return [{"role": "user", "content": list(parts)}]


#: What `medialane check` does not send, since it compares JSON in UTF-8.
REQUESTS = {
    "embeddings in bytes": ("/v1/embeddings", {"messages": chat(image(0)), "encoding_format": "bytes"}),
    "columns in float16": (
        "/v1/embeddings",
        {"messages": chat(image(0)), "dimensions": 32, "encoding_format": "base64", "embed_dtype": "float16"},
    ),
    "many tokens in bytes": ("/pooling", {"input": list(range(100, 110)) * 350, "encoding_format": "bytes"}),
    "many images": (
        "/v1/rerank",
        {"query": "boat", "documents": [{"content": [image(n % 12, 64 + 8 * n, 64)]} for n in range(40)]},
    ),
    "bits": ("/v2/embed", {"images": [image(2)["image_url"]["url"]], "embedding_types": ["float", "ubinary"]}),
    "an adapter that is not loaded": ("/pooling", {"model": "nobody", "messages": chat(text("x"))}),
    "no such task": ("/v1/chat/completions", {"messages": chat(text("x"))}),
}


@dataclass(frozen=True)
class Servers:
    """Both servers of one model."""

    ours: MedialaneProcess
    plain: str
    http: aiohttp.ClientSession

    async def ask(self, base, path, body):
        """Status and the response without what differs between equal ones."""
        async with self.http.post(base + path, json={"model": self.ours.model, **body}) as response:
            data = await response.read()
            if response.content_type == "application/json":
                return response.status, _stable(json.loads(data))
            return response.status, [data.hex(), _stable(json.loads(response.headers["metadata"]))]

    async def decisions(self, limit):
        """The last routing decisions, newest first."""
        async with self.http.get(f"{self.ours.base_url}/medialane/decisions?limit={limit}") as response:
            return (await response.json())["decisions"]

    async def both(self, path, body):
        return await asyncio.gather(self.ask(self.ours.base_url, path, body), self.ask(self.plain, path, body))


def _stable(document):
    found = {name: value for name, value in document.items() if name not in ("id", "created", "request_id")}
    if isinstance(error := found.get("error"), dict):
        found["error"] = {name: value for name, value in error.items() if name != "request_id"}
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def servers(environ, tmp_path_factory):
    family = next(family for family in FAMILIES if family.name == "qwen3_vl_embedding")
    model, logs = str(family.build(cache_folder(os.environ))), tmp_path_factory.mktemp(family.name)
    write_adapter(adapter := tmp_path_factory.mktemp(ADAPTER), Path(model))
    flags = (*family.flags, "--enable-lora", f"--max-lora-rank={2 * RANK}", f"--lora-modules={ADAPTER}={adapter}")
    ours = MedialaneProcess.spawn("serve", model, MEDIALANE_FLAGS, flags, environ=environ, log=logs / "serve.log")
    flags = (*flags, ONE_PROCESS_ENGINE)
    try:
        async with (
            plain_vllm(model, flags, environ=environ, log=logs / "plain.log", start_s=START_S) as plain,
            aiohttp.ClientSession() as http,
        ):
            await ours.answers()
            await eventually(lambda: "Ctrl-C stops it" in ours.log.read_text(), "all workers are ready", START_S)
            yield Servers(ours, plain.base_url.removesuffix("/v1"), http)
            ours.process.terminate()
        assert ours.process.wait(STOP_S) == 0
    finally:
        ours.stop()


@pytest.mark.parametrize(("path", "body"), REQUESTS.values(), ids=REQUESTS)
async def test_response_equals_plain_vllm(servers, path, body):
    ours, plain = await servers.both(path, body)
    assert ours == plain


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_adapter_changes_embeddings_of_media_as_in_plain_vllm(servers, path):
    body = {"messages": chat(image(0), text("What is it?"))}
    (status, base), _ = await servers.both(path, body)
    ours, plain = await servers.both(path, {"model": ADAPTER, **body})
    assert ours == plain
    assert (status, ours[0]) == (200, 200)
    assert ours[1]["data"] != base["data"]


async def test_requests_of_a_killed_worker_are_answered_by_the_other(servers):
    """Last: `serve` restarts the worker, but the tests do not wait for it."""
    body = {"messages": chat(image(5, 900, 700), text("Describe it"))}
    expected, _ = await servers.both("/pooling", body)
    (latest,) = await servers.decisions(1)
    pid = servers.ours.worker_pid(latest["worker"])
    os.kill(pid, signal.SIGSTOP)  # it has the image: requests are sent to it, and wait there
    asked = [asyncio.create_task(servers.ask(servers.ours.base_url, "/pooling", body)) for _ in range(8)]

    async def waits():
        return any(d["worker"] == latest["worker"] and d["time"] > latest["time"] for d in await servers.decisions(8))

    await eventually(waits)
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.gather(*asked) == [expected] * len(asked)
    async with servers.http.get(servers.ours.base_url + "/metrics") as response:
        migrated = re.findall(r"^medialane_migrations_total{.*} (\S+)", await response.text(), re.MULTILINE)
    assert sum(map(float, migrated)) > 0
