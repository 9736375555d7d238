"""LangChain, with its package for OpenAI's API."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import APIError
from pydantic import BaseModel
from recorded import FREQUENCY_PENALTY, MAX_TOKENS, QUESTION, TOO_LONG, Calls, png_url, settings

server = settings()


def model(**options: Any) -> ChatOpenAI:
    made: dict[str, Any] = {"model": server.model, "max_tokens": MAX_TOKENS, "temperature": 0, **options}
    return ChatOpenAI(base_url=f"{server.base_url}/v1", api_key=server.key or "none", max_retries=0, **made)


def describe(error: Exception) -> dict[str, Any]:
    body = error.body if isinstance(error, APIError) and isinstance(error.body, dict) else {}
    return {"status": getattr(error, "status_code", None), "message": body.get("message", str(error))}


calls = Calls(describe)


class Picture(BaseModel):
    """A picture."""

    kind: Literal["photo", "drawing"]
    sharp: bool


@tool
def paint(colour: Literal["red", "green", "blue"]) -> str:
    """Paint a picture."""
    return f"It is {colour}."


def asked(*parts: dict[str, Any], words: str = QUESTION) -> list[Any]:
    return [HumanMessage([*parts, {"type": "text", "text": words}])]


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def shown(message: Any) -> dict[str, Any]:
    found = message.model_dump(mode="json", include={"type", "content", "tool_calls", "usage_metadata"})
    return {**found, "finish_reason": message.response_metadata.get("finish_reason")}


@calls
def text() -> Any:
    return shown(model().invoke(asked()))


@calls
def image_by_url() -> Any:
    return shown(model().invoke(asked(image(server.photo_url))))


@calls
def image_in_langchains_own_form() -> Any:
    part = {"type": "image", "source_type": "base64", "data": server.photo_base64(), "mime_type": "image/jpeg"}
    return shown(model().invoke(asked(part)))


def document(part: dict[str, Any], name: str = "") -> list[dict[str, Any]]:
    """The part of a document, or of its pages: see `Settings.document`."""
    return server.document(part, lambda text: {"type": "text", "text": text}, lambda data: image(png_url(data)), name)


@calls
def document_in_langchains_own_form() -> Any:
    part = {"type": "file", "base64": server.pdf_base64(), "mime_type": "application/pdf", "filename": "report.pdf"}
    return shown(model().invoke(asked(*document(part, "report.pdf"))))


@calls
def document_by_the_responses_api() -> Any:
    part = {"type": "file", "url": server.pdf_url, "mime_type": "application/pdf"}
    return shown(model(use_responses_api=True).invoke(asked(*document(part))))


@calls
def stream() -> Any:
    whole = None
    for chunk in model(stream_usage=True).stream(asked(image(server.data_url()))):
        whole = chunk if whole is None else whole + chunk
    return shown(whole)


@calls
def batch_of_three_at_once() -> Any:
    return [shown(m) for m in model().batch([asked(), asked(image(server.data_url())), asked(words="Which numbers?")])]


@calls
def asynchronous_stream() -> Any:
    async def joined() -> str:
        return "".join([chunk.text async for chunk in model().astream(asked())])

    return asyncio.run(joined())


@calls
def tool_forced() -> Any:
    return shown(
        model(max_tokens=150, frequency_penalty=FREQUENCY_PENALTY)
        .bind_tools([paint], tool_choice="paint", strict=True)
        .invoke(asked())
    )


@calls
def result_of_a_tool() -> Any:
    said = (
        model(max_tokens=150, frequency_penalty=FREQUENCY_PENALTY)
        .bind_tools([paint], tool_choice="paint", strict=True)
        .invoke(asked())
    )
    result = ToolMessage(paint.invoke(said.tool_calls[0]["args"]), tool_call_id=said.tool_calls[0]["id"])
    return shown(model().bind_tools([paint]).invoke([*asked(), said, result]))


@calls
def structured_output() -> Any:
    return (
        model(max_tokens=150, frequency_penalty=FREQUENCY_PENALTY)
        .with_structured_output(Picture)
        .invoke(asked(image(server.data_url())))
        .model_dump()
    )


@calls
def structured_output_by_a_tool() -> Any:
    made = model(max_tokens=150, frequency_penalty=FREQUENCY_PENALTY).with_structured_output(
        Picture, method="function_calling", strict=True
    )
    return made.invoke(asked()).model_dump()


@calls
def responses_api() -> Any:
    return shown(model(use_responses_api=True).invoke(asked(image(server.data_url()))))


@calls
def unknown_model() -> Any:
    model(model="no-such-model").invoke(asked())


@calls
def prompt_too_long() -> Any:
    model().invoke(asked(words=TOO_LONG))


@calls
def broken_image() -> Any:
    model().invoke(asked(image(server.broken_url())))


if __name__ == "__main__":
    calls.print_all()
