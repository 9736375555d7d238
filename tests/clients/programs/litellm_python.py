"""LiteLLM, as a library, with its provider for vLLM."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would download prices

from typing import Any

import litellm
from pydantic import BaseModel
from recorded import FREQUENCY_PENALTY, MAX_TOKENS, PARAMETERS, QUESTION, SCHEMA, TOO_LONG, Calls, settings, stream

server = settings()
TOOL = {"name": "describe", "description": "Describe a picture", "parameters": PARAMETERS, "strict": True}
TOOLS = [{"type": "function", "function": TOOL}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "picture", "schema": SCHEMA, "strict": True}}


def describe(error: Exception) -> dict[str, Any]:
    # Its messages have the whole body of an error, in which ids differ.
    return {"status": getattr(error, "status_code", None), "provider": getattr(error, "llm_provider", None)}


calls = Calls(describe)


def dumped(found: BaseModel) -> dict[str, Any]:
    return found.model_dump(mode="json", warnings=False, exclude={"_hidden_params", "_response_headers"})


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: dict[str, Any], words: str = QUESTION, model: str = server.model, **options: Any) -> Any:
    """A completion, or its chunks."""
    made = litellm.completion(
        **{
            "model": f"hosted_vllm/{model}",
            "api_base": f"{server.base_url}/v1",
            "api_key": server.key or "none",
            "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": words}]}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "num_retries": 0,
            **options,
        }
    )
    return stream(map(dumped, made)) if options.get("stream") else dumped(made)


@calls
def text() -> Any:
    return chat()


@calls
def with_an_image() -> Any:
    return chat(image(server.data_url()))


@calls
def with_an_image_by_url() -> Any:
    return chat(image(server.photo_url))


@calls
def stream_with_usage() -> Any:
    return chat(image(server.data_url()), stream=True, stream_options={"include_usage": True})


@calls
def tool_forced() -> Any:
    return chat(
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "describe"}},
        max_tokens=150,
        frequency_penalty=FREQUENCY_PENALTY,
    )


@calls
def json_schema() -> Any:
    return chat(image(server.data_url()), response_format=FORMAT, max_tokens=150, frequency_penalty=FREQUENCY_PENALTY)


@calls
def unknown_model() -> Any:
    chat(model="no-such-model")


@calls
def prompt_too_long() -> Any:
    chat(words=TOO_LONG)


@calls
def broken_image() -> Any:
    chat(image(server.broken_url()))


if __name__ == "__main__":
    calls.print_all()
