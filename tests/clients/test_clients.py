"""Clients get from medialane what they get from plain vLLM: parsed answers, events of streams, errors."""

import sys

import pytest
from client_programs import OWN_PYTHON, PROGRAMS, by_node, by_python, printed
from openai_http import in_flight

from waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

#: Errors of media are medialane's own: their code is a string, and they name the field (docs/api.md).
OWN = ("code", "type", "param", "message")

CLIENTS = {
    "curl": by_python("curl.py"),
    "OpenAI for Python": by_python(
        "openai_python.py",
        differing=dict.fromkeys(("broken image", "stream with a broken image", "image that is not there"), OWN),
    ),
    "OpenAI for JavaScript": by_node(
        "openai.mjs", differing=dict.fromkeys(("broken image", "image that is not there"), OWN)
    ),
    "Anthropic for Python": by_python(
        "anthropic_python.py", differing=dict.fromkeys(("broken image", "image that is not there"), ("type", "message"))
    ),
    "Anthropic for JavaScript": by_node("anthropic.mjs", differing={"broken image": ("type", "message")}),
    "Vercel's AI SDK": by_node("ai_sdk.mjs", differing={"broken image": ("code", "message")}),
    "LangChain": by_python("langchain_python.py", OWN_PYTHON, differing={"broken image": ("message",)}),
    "LiteLLM": by_python("litellm_python.py", OWN_PYTHON),
    "pydantic-ai": by_python("pydantic_ai_python.py", OWN_PYTHON, differing={"broken image": ("message",)}),
}


@pytest.mark.parametrize("name", CLIENTS)
async def test_it_gets_what_plain_vllm_gives(name, ours, plain, media, subtests):
    """Plain vLLM gets the pages of documents instead of these."""
    settings = [
        {"base_url": server.base_url, "model": server.model, "key": "", "takes_documents": server is ours, **media}
        for server in (ours, plain)
    ]
    await CLIENTS[name].asks_the_same(*settings, subtests)
    await eventually(lambda: in_flight(ours, 0), "requests that the client has left are ended")


async def test_vllm_bench_serve_gets_what_plain_vllm_gives(ours, plain):
    program = [sys.executable, str(PROGRAMS / "vllm_bench.py")]
    found, right = await printed(*program, ours.model, ours.base_url, plain.base_url)
    for field in ("completed", "failed", "total_input_tokens", "output_lens", "generated_texts"):
        assert found[field] == right[field], field
    assert (found["completed"], found["failed"]) == (found["num_prompts"], 0)
    assert all(found["generated_texts"])
