"""Clients get from medialane what they get from plain vLLM: parsed answers, events of streams, errors."""

import asyncio
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from compared_clients import assert_equal, outcomes
from openai_http import in_flight, photo
from picture_server import picture_server

from waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
NODE = Path(__file__).with_name("node")


#: Clients whose dependencies need not agree with vLLM's have an environment of their own (`make programs`).
OWN_PYTHON = ROOT / ".venv" / "clients" / "bin" / "python"


@dataclass(frozen=True)
class Client:
    """A program and what it needs. `differing` are the fields of errors that differ from plain vLLM's, by call."""

    command: tuple[str, ...]
    needs: Path | None = None
    differing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def lacks(self) -> str:
        """Why it cannot run, or nothing."""
        if shutil.which(self.command[0]) is None:
            return f"{self.command[0]} is not installed"
        return f"{self.needs} is not there (make programs)" if self.needs and not self.needs.exists() else ""


def by_python(program: str, python: Path = Path(sys.executable), **more: Any) -> Client:
    return Client((str(python), str(PROGRAMS / program)), **more)


def by_node(program: str, **more: Any) -> Client:
    return Client(("node", str(NODE / program)), NODE / "node_modules", **more)


CLIENTS = {
    "curl": by_python("curl.py"),
    "OpenAI for Python": by_python("openai_python.py"),
    "OpenAI for JavaScript": by_node("openai.mjs"),
    "Anthropic for Python": by_python("anthropic_python.py"),
    "Anthropic for JavaScript": by_node("anthropic.mjs"),
    "Vercel's AI SDK": by_node("ai_sdk.mjs"),
    "LangChain": by_python("langchain_python.py", OWN_PYTHON),
    "LiteLLM": by_python("litellm_python.py", OWN_PYTHON),
    "pydantic-ai": by_python("pydantic_ai_python.py", OWN_PYTHON),
    "vllm bench serve": by_python("vllm_bench.py"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def media(tmp_path_factory):
    """Files and URLs for the programs."""
    file = tmp_path_factory.mktemp("media") / "photo.jpg"
    file.write_bytes(photo(70))
    async with picture_server({"photo.jpg": photo(70)}) as web:
        yield {"photo": str(file), "photo_url": web.url("photo.jpg"), "missing_url": web.url("missing.jpg")}


@pytest.mark.parametrize("name", CLIENTS)
async def test_it_gets_what_plain_vllm_gives(name, ours, plain, media, subtests):
    client = CLIENTS[name]
    if client.lacks:
        pytest.skip(f"NOT TESTED: {name}: {client.lacks}")
    settings = [{"base_url": s.base_url, "model": s.model, "key": "", "clip": "", **media} for s in (ours, plain)]
    found, right = await asyncio.gather(*(outcomes(client.command, of) for of in settings))
    assert found.keys() == right.keys()
    for call in right:
        with subtests.test(call):
            assert_equal(found[call], right[call], client.differing.get(call, ()))
    await eventually(lambda: in_flight(ours, 0), "requests that a client has left are ended")
