"""Real vLLM for whole requests: one plain server per session, started when the first test asks for it."""

import os

import pytest
import pytest_asyncio

from medialane.cli.plain_vllm import plain_vllm as start_plain_vllm
from medialane.vllm_bridge.tiny_model import TINY_MODEL_FLAGS

#: What vLLM takes from the environment only, for a small model on shared CPUs.
ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

#: Tools and reasoning are parsed as a user would have them parsed.
SERVER_FLAGS = (*TINY_MODEL_FLAGS, "--enable-auto-tool-choice", "--tool-call-parser=hermes")


@pytest.fixture(scope="session")
def vllm_environ() -> dict[str, str]:
    """The whole environment of a process that runs vLLM."""
    return {**ENVIRON, **os.environ}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def plain_vllm(tiny_model, vllm_environ, tmp_path_factory):
    """Plain vLLM with the tiny model: `base_url`, `model`. Its answers are the right ones."""
    log = tmp_path_factory.mktemp("plain_vllm") / "server.log"
    async with start_plain_vllm(str(tiny_model), SERVER_FLAGS, environ=vllm_environ, log=log) as server:
        yield server
