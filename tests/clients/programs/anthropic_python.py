"""Anthropic's client for Python."""

from __future__ import annotations

import base64
from typing import Any

from anthropic import Anthropic, APIError, NotFoundError
from pydantic import BaseModel
from recorded import LONG_ANSWER, MAX_TOKENS, PARAMETERS, QUESTION, TOO_LONG, Calls, settings, stream

server = settings()
client = Anthropic(base_url=server.base_url, api_key=server.key or "none", max_retries=0)

TOOLS = [{"name": "describe", "description": "Describe a picture", "input_schema": PARAMETERS, "strict": True}]
#: The client itself knows no temperature.
GREEDY = {"extra_body": {"temperature": 0}}
#: After these words the tiny model soon ends its call.
CALLED = {"tools": TOOLS, "words": "A photograph", "max_tokens": 150}


def describe(error: Exception) -> dict[str, Any]:
    body = error.body if isinstance(error, APIError) and isinstance(error.body, dict) else {}
    found = body.get("error") or {}
    return {
        "status": getattr(error, "status_code", None),
        "type": found.get("type"),
        "message": found.get("message", str(error)),
    }


calls = Calls(describe)


def dumped(found: BaseModel) -> dict[str, Any]:
    return found.model_dump(mode="json", exclude_unset=True, warnings=False)


def image(data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": data}}


def document(source: dict[str, Any], **members: str) -> list[dict[str, Any]]:
    """The block of a document, or those of its pages: see `Settings.document`."""

    def png(data: bytes) -> dict[str, Any]:
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
        return {"type": "image", "source": source}

    block = {"type": "document", "source": source, **members}
    return server.document(block, lambda text: {"type": "text", "text": text}, png, members.get("title", ""))


def asked(*parts: dict[str, Any], words: str = QUESTION) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": words}]}]


def message(*parts: dict[str, Any], words: str = QUESTION, **options: Any) -> Any:
    """A message, or its events."""
    made = client.messages.create(
        **{
            "model": server.model,
            "messages": asked(*parts, words=words),
            "max_tokens": MAX_TOKENS,
            **GREEDY,
            **options,
        }
    )
    return stream(map(dumped, made)) if options.get("stream") else dumped(made)


@calls
def message_of_text() -> Any:
    return message(system="Be brief.")


@calls
def message_with_an_image() -> Any:
    return message(image(server.photo_base64()))


@calls
def message_with_an_image_by_url() -> Any:
    return message({"type": "image", "source": {"type": "url", "url": server.photo_url}})


@calls
def message_with_a_document() -> Any:
    return message(
        *document({"type": "base64", "media_type": "application/pdf", "data": server.pdf_base64()}, title="Report")
    )


@calls
def message_with_a_document_by_url() -> Any:
    return message(*document({"type": "url", "url": server.pdf_url}))


@calls
def message_with_a_document_that_was_sent_before() -> Any:
    """It is then listed, read and deleted; to messages it is unknown from then on."""
    if not server.takes_documents:
        return message(*document({}))
    files = client.beta.files
    sent = files.upload(file=("report.pdf", server.pdf.read_bytes()))
    block = {"type": "document", "source": {"type": "file", "file_id": sent.id}}
    made = message(block)
    found = files.retrieve_metadata(sent.id)
    named = (found.filename, found.size_bytes, found.mime_type)
    assert named == ("report.pdf", server.pdf.stat().st_size, "application/pdf")
    assert sent.id in [file.id for file in files.list()]
    assert files.download(sent.id).read() == server.pdf.read_bytes()
    assert files.delete(sent.id).type == "file_deleted"
    assert sent.id not in [file.id for file in files.list()]
    try:
        message(block)
    except NotFoundError:
        return made
    raise AssertionError("the file is still there")


@calls
def message_with_an_image_that_was_sent_before() -> Any:
    if not server.takes_documents:
        return message(image(server.photo_base64()))
    sent = client.beta.files.upload(file=("photo.jpg", server.photo.read_bytes()))
    return message({"type": "image", "source": {"type": "file", "file_id": sent.id}})


@calls
def message_with_a_document_of_text() -> Any:
    text = {"type": "text", "text": "some words"}
    source = {"type": "text", "media_type": "text/plain", "data": "some words"}
    return message({"type": "document", "source": source} if server.takes_documents else text)


@calls
def document_as_the_result_of_a_tool() -> Any:
    use = {"type": "tool_use", "id": "toolu_1", "name": "describe", "input": {"colour": "red"}}
    pages = document({"type": "base64", "media_type": "application/pdf", "data": server.pdf_base64()})
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": pages}
    answers = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return message(messages=[*asked(), *answers], tools=TOOLS)


@calls
def message_with_a_stop_sequence() -> Any:
    return message(stop_sequences=["e"], max_tokens=40)


@calls
def stream_of_a_message() -> Any:
    return message(image(server.photo_base64()), stream=True)


@calls
def stream_put_together_by_the_client() -> Any:
    ask = {"model": server.model, "messages": asked(), "max_tokens": MAX_TOKENS, **GREEDY}
    with client.messages.stream(**ask) as events:
        kinds = sorted({event.type for event in events})
        return [kinds, dumped(events.get_final_message())]


@calls
def tools_offered() -> Any:
    return message(image(server.photo_base64()), tools=TOOLS)


@calls
def tool_forced() -> Any:
    return message(tool_choice={"type": "tool", "name": "describe"}, **CALLED)


@calls
def stream_of_a_tool_that_is_required() -> Any:
    return message(tool_choice={"type": "any"}, stream=True, **CALLED)


@calls
def image_as_the_result_of_a_tool() -> Any:
    use = {"type": "tool_use", "id": "toolu_1", "name": "describe", "input": {"colour": "red"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image(server.photo_base64())]}
    answers = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return message(messages=[*asked(), *answers], tools=TOOLS)


@calls
def number_of_tokens() -> Any:
    return dumped(client.messages.count_tokens(model=server.model, messages=asked(image(server.photo_base64()))))


@calls
def model_list() -> Any:
    return [model.id for model in client.models.list()]


@calls
def unknown_model() -> Any:
    message(model="no-such-model")


@calls
def prompt_too_long() -> Any:
    message(words=TOO_LONG)


@calls
def stream_of_a_prompt_too_long() -> Any:
    message(words=TOO_LONG, stream=True)


@calls
def no_token() -> Any:
    message(max_tokens=0)


@calls
def unknown_kind_of_content() -> Any:
    message({"type": "smell", "text": "roses"})


@calls
def broken_image() -> Any:
    message(image(server.broken_url().partition(",")[2]))


@calls
def image_that_is_not_there() -> Any:
    message({"type": "image", "source": {"type": "url", "url": server.missing_url}})


@calls
def stream_that_the_client_leaves() -> Any:
    made = client.messages.create(
        model=server.model,
        messages=asked(image(server.photo_base64())),
        max_tokens=LONG_ANSWER,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    with made:
        next(made)
    return "left"


if __name__ == "__main__":
    calls.print_all()
