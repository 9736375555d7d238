"""Clients get from medialane what they get from plain vLLM: parsed answers, events of streams, errors."""

import pytest
from client_programs import OWN_PYTHON, by_node, by_python
from openai_http import in_flight

from waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

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


@pytest.mark.parametrize("name", CLIENTS)
async def test_it_gets_what_plain_vllm_gives(name, ours, plain, media, subtests):
    settings = [{"base_url": server.base_url, "model": server.model, "key": "", **media} for server in (ours, plain)]
    await CLIENTS[name].asks_the_same(*settings, subtests)
    await eventually(lambda: in_flight(ours, 0), "requests that the client has left are ended")
