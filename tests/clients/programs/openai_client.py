"""OpenAI's client for Python and how its calls are made, for several programs."""

from __future__ import annotations

from typing import Any

from openai import APIError, OpenAI
from pydantic import BaseModel
from recorded import MAX_TOKENS, QUESTION, png_url, settings, stream

server = settings()
client = OpenAI(base_url=f"{server.base_url}/v1", api_key=server.key or "none", max_retries=0)


def describe(error: Exception) -> dict[str, Any]:
    if not isinstance(error, APIError):
        return {"message": str(error)}
    body = error.body if isinstance(error.body, dict) else {}
    return {
        "status": getattr(error, "status_code", None),
        "code": error.code,
        "type": error.type,
        "param": error.param,
        "message": body.get("message", error.message),
    }


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def document(part: dict[str, Any], name: str = "") -> list[dict[str, Any]]:
    """The part of a document, or of its pages: see `Settings.document`."""
    return server.document(part, lambda text: {"type": "text", "text": text}, lambda data: image(png_url(data)), name)


def asked(*parts: dict[str, Any], words: str = QUESTION) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": words}]}]


def chat(*parts: dict[str, Any], words: str = QUESTION, **options: Any) -> Any:
    """A completion, or its chunks."""
    made = client.chat.completions.create(
        **{
            "model": server.model,
            "messages": asked(*parts, words=words),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            **options,
        }
    )
    return stream(map(dumped, made)) if options.get("stream") else dumped(made)


def dumped(found: BaseModel) -> dict[str, Any]:
    return found.model_dump(mode="json", exclude_unset=True, warnings=False)
