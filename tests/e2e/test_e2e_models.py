"""`serve --config models.toml` as a user starts it, with two models over simulated workers."""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from medialane_process import MedialaneProcess, free_port, kill, launch
from openai_http import picture, text
from process_tree import command_of, descendants

from medialane.testing.tiny_model import TINY_MODEL_FLAGS
from waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

PROGRAM = Path(__file__).with_name("serve_simulated_program.py")
MODELS = """
port = {port}
arena-size = "64MiB"
preparers = 1
log-dir = "{folder}/logs"
prepare-queue-timeout = 200
[models.vision]
model = "{model}"
[models."org/text"]
model = "{model}"
gateways = 2
flags = "--language-model-only --served-model-name text words"
"""
KEY = {"authorization": "Bearer key"}
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    "/v1/responses": {"input": "hello"},
    "/tokenize": {"prompt": "hello"},
}


class Served:
    """The command, and a client of its port."""

    def __init__(self, process, session):
        self.process, self.session = process, session

    async def ask(self, path, *, method="POST", session=None, **options):
        """Status and parsed body."""
        url = f"{self.process.base_url if session is None else 'http://gateway'}{path}"
        async with (session or self.session).request(method, url, headers=KEY, **options) as response:
            body = await response.read()
            return response.status, json.loads(body) if body[:1] in (b"{", b"[") else body

    async def chat(self, model, content="hello"):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "model": model}
        return await self.ask("/v1/chat/completions", json=body)

    def gateways(self, title):
        """Its processes, and where they listen for the name router."""
        found = {pid: command_of(pid).split() for pid in descendants(self.process.pid) if title in command_of(pid)}
        return {
            pid: words[words.index("--http-socket") + 1] for pid, words in found.items() if "--http-socket" in words
        }


@pytest.fixture(scope="module")
def process(tiny_model, vllm_environ, tmp_path_factory):
    folder = Path(tempfile.mkdtemp(prefix="ml-e2e-", dir="/tmp"))  # a short path, for sockets
    port = free_port()
    (folder / "models.toml").write_text(MODELS.format(port=port, folder=folder, model=tiny_model))
    log = tmp_path_factory.mktemp("models") / "serve.log"
    words = ["--config", str(folder / "models.toml"), "--", *TINY_MODEL_FLAGS]
    environ = {**vllm_environ, "XDG_RUNTIME_DIR": str(folder), "VLLM_API_KEY": "key"}
    started = launch([sys.executable, str(PROGRAM), *words], environ=environ, log=log)
    yield MedialaneProcess(started, port, str(tiny_model), log)
    started.send_signal(signal.SIGTERM)
    assert started.wait(60) == 0
    assert not [name for name in os.listdir(folder) if name.startswith("medialane-run-")]
    shutil.rmtree(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(process):
    async with aiohttp.ClientSession() as session:
        served = Served(process, session)

        async def is_whole():
            return "serves 2 models" in process.log.read_text()

        await eventually(is_whole, "both models are served", 200, more=process.tail)
        yield served


async def test_each_model_answers_by_its_names(served):
    for name, answers in (("vision", "vision"), ("text", "text"), ("words", "text")):
        status, body = await served.chat(name)
        assert (status, body["model"]) == (200, answers)
        assert body["usage"]["completion_tokens"] == 3
    image = [picture(1), text("What is it?")]
    status, body = await served.chat("vision", image)
    assert status == 200, body
    assert (await served.chat("text", image))[0] == 400


async def test_all_models_are_listed_measured_and_shown(served):
    _, body = await served.ask("/v1/models", method="GET")
    assert [card["id"] for card in body["data"]] == ["vision", "text", "words"]
    _, page = await served.ask("/metrics", method="GET")
    series = [line for line in page.decode().splitlines() if line and not line.startswith("#")]
    assert all('model_name="' in line for line in series)
    for name in ("vision", "text"):
        assert f'medialane_model_up{{model_name="{name}"}} 1' in series
        assert any(line.startswith("process_cpu_seconds_total{") and f'"{name}"' in line for line in series)
    assert any(line.startswith('medialane_arena_bytes{model_name="vision"') for line in series)
    assert await served.ask("/health", method="GET") == (200, b"")


async def test_state_of_all_is_shown_to_this_machine_and_not_through_a_proxy(served):
    status, body = await served.ask("/medialane/state", method="GET")
    assert status == 200
    assert {view["name"]: view["state"]["model"] for view in body["models"]} == {"vision": "vision", "org/text": "text"}
    status, body = await served.ask("/medialane/state?model=words", method="GET")
    assert (status, body["model"]) == (200, "text")
    async with served.session.get(
        f"{served.process.base_url}/medialane/state", headers={"x-forwarded-for": "203.0.113.9"}
    ) as response:
        assert response.status == 403


@pytest.mark.parametrize("path", PATHS)
async def test_missing_model_gets_what_its_gateway_would_answer(served, path):
    body = {**PATHS[path], "model": "no such"}
    socket = next(iter(served.gateways("medialane gateway").values()))
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket)) as session:
        direct = await served.ask(path, json=body, session=session)
    status, routed = await served.ask(path, json=body)
    expected, num_named = re.subn(
        r"aliases: (vision|text, words)\.", "aliases: vision, text, words.", json.dumps(without_id(direct[1]))
    )
    assert num_named == 1
    assert (status, without_id(routed)) == (direct[0], json.loads(expected))


def without_id(body):
    body.pop("request_id", None)
    body["error"].pop("request_id", None)
    return body


async def test_model_whose_gateway_is_killed_is_unavailable_and_the_other_serves(served):
    (pid,) = [pid for pid, path in served.gateways("medialane gateway").items() if "/0/" in path]
    kill(pid)

    async def is_unavailable():
        status, body = await served.chat("vision")
        return status == 503 and body["error"]["code"] == "model_unavailable"

    await eventually(is_unavailable, "it is unavailable", 10)
    assert (await served.chat("text"))[0] == 200

    async def is_back():
        return (await served.chat("vision"))[0] == 200

    await eventually(is_back, "it is restarted", 120)
