"""pydantic-ai, with its model for OpenAI's chat API."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, DocumentUrl, ImageUrl, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from recorded import FREQUENCY_PENALTY, MAX_TOKENS, QUESTION, TOO_LONG, Calls, settings

server = settings()


class Picture(BaseModel):
    """A picture."""

    kind: Literal["photo", "drawing"]
    sharp: bool


def describe(error: Exception) -> dict[str, Any]:
    if not isinstance(error, ModelHTTPError):
        return {"message": str(error)}
    body = error.body if isinstance(error.body, dict) else {}
    return {"status": error.status_code, "message": body.get("message")}


calls = Calls(describe)


def agent(name: str = server.model, *, max_tokens: int = MAX_TOKENS, **options: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=f"{server.base_url}/v1", api_key=server.key or "none")
    settings = {"max_tokens": max_tokens, "temperature": 0, "frequency_penalty": FREQUENCY_PENALTY}
    return Agent(OpenAIChatModel(name, provider=provider), model_settings=settings, retries=0, **options)


def shown(result: Any) -> dict[str, Any]:
    output, usage = result.output, result.usage() if callable(result.usage) else result.usage
    made = output.model_dump() if isinstance(output, BaseModel) else output
    return {"output": made, "tokens": [usage.input_tokens, usage.output_tokens]}


def photo() -> BinaryContent:
    return BinaryContent(server.photo.read_bytes(), media_type="image/jpeg")


@calls
def text() -> Any:
    return shown(agent().run_sync(QUESTION))


def document(part: Any) -> list[Any]:
    """The document, or its pages: see `Settings.document`."""
    return server.document(part, str, lambda data: BinaryContent(data, media_type="image/png"), "filename.pdf")


@calls
def with_a_document() -> Any:
    part = BinaryContent(server.pdf.read_bytes(), media_type="application/pdf")
    return shown(agent().run_sync([*document(part), QUESTION]))


@calls
def with_a_document_by_url() -> Any:
    return shown(agent().run_sync([*document(DocumentUrl(server.pdf_url, force_download="allow-local")), QUESTION]))


@calls
def with_an_image() -> Any:
    return shown(agent().run_sync([QUESTION, photo()]))


@calls
def with_an_image_by_url() -> Any:
    return shown(agent().run_sync([QUESTION, ImageUrl(server.photo_url)]))


@calls
def streamed() -> Any:
    async def whole() -> str:
        async with agent().run_stream([QUESTION, photo()]) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    return asyncio.run(whole())


@calls
def output_by_a_tool() -> Any:
    return shown(agent(max_tokens=150, output_type=ToolOutput(Picture, strict=True)).run_sync([QUESTION, photo()]))


@calls
def output_by_a_json_schema() -> Any:
    return shown(agent(max_tokens=150, output_type=NativeOutput(Picture)).run_sync(QUESTION))


@calls
def unknown_model() -> Any:
    agent("no-such-model").run_sync(QUESTION)


@calls
def prompt_too_long() -> Any:
    agent().run_sync(TOO_LONG)


@calls
def broken_image() -> Any:
    agent().run_sync([QUESTION, BinaryContent(server.photo.read_bytes()[:5000], media_type="image/jpeg")])


if __name__ == "__main__":
    calls.print_all()
