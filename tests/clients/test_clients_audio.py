"""Clients of a model that hears, behind a key: uploads, audio in chats, refused keys."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import pytest_asyncio
from client_programs import by_node, by_python
from medialane_process import FORKING_VLLM, ONE_PROCESS_ENGINE, START_S, MedialaneProcess
from tiny_families import FAMILIES

from medialane.testing.tiny_model import TINY_MODEL_ENVIRON, cache_folder
from medialane.tools.check import plain_vllm

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
]

KEY = "tested-key"
FLAGS = ("--workers", "1", "--preparers", "1", "--arena-size", "256MiB")

#: Errors of media have codes of their own, and say more.
OWN = {"broken audio": ("message", "type", "param", "code")}

CLIENTS = {
    "OpenAI for Python": by_python("openai_python_audio.py", differing=OWN),
    "OpenAI for JavaScript": by_node("openai_audio.mjs", differing=OWN),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def servers(tmp_path_factory):
    """The addresses of medialane and of plain vLLM, both with the key, and their model."""
    family = FAMILIES["qwen3_asr"]
    model, logs = str(family.build(cache_folder(os.environ))), tmp_path_factory.mktemp("audio")
    runtime = Path(tempfile.mkdtemp(prefix="ml-cli-"))
    environ = {**TINY_MODEL_ENVIRON, **os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    flags = (*family.flags, "--max-model-len=512", "--api-key", KEY)  # random weights go on to the end
    ours = MedialaneProcess.spawn("serve", model, FLAGS, flags, environ=environ, log=logs / "serve.log")
    plain_flags, log = (*flags, ONE_PROCESS_ENGINE), logs / "plain.log"
    try:
        async with plain_vllm(
            model, plain_flags, environ=environ, log=log, start_s=START_S, program=FORKING_VLLM
        ) as plain:
            await ours.answers()
            yield [{"base_url": url, "model": model} for url in (ours.base_url, plain.base_url.removesuffix("/v1"))]
    finally:
        ours.stop()
        shutil.rmtree(runtime)


@pytest.mark.parametrize("name", CLIENTS)
async def test_it_gets_what_plain_vllm_gives(name, servers, media, subtests):
    settings = [{**server, "key": KEY, **media} for server in servers]
    await CLIENTS[name].asks_the_same(*settings, subtests)
