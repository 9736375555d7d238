"""OpenAI's client for Python."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from openai import AsyncOpenAI, NotFoundError, OpenAI
from openai_client import asked, chat, client, describe, document, dumped, image, server
from pydantic import BaseModel
from recorded import (
    FREQUENCY_PENALTY,
    LONG_ANSWER,
    MAX_TOKENS,
    PARAMETERS,
    QUESTION,
    SCHEMA,
    TOO_LONG,
    Calls,
    png_url,
    stream,
)

calls = Calls(describe)

TOOL = {"name": "describe", "description": "Describe a picture", "parameters": PARAMETERS, "strict": True}
TOOLS = [{"type": "function", "function": TOOL}]
FORCED = {"type": "function", "function": {"name": "describe"}}
WRITTEN = {"max_tokens": 150, "frequency_penalty": FREQUENCY_PENALTY}
FORMAT = {"type": "json_schema", "json_schema": {"name": "picture", "schema": SCHEMA, "strict": True}}


def input_text(words: str) -> dict[str, Any]:
    return {"type": "input_text", "text": words}


def input_image(data: bytes) -> dict[str, Any]:
    return {"type": "input_image", "detail": "auto", "image_url": png_url(data)}


def answered(*parts: dict[str, Any]) -> Any:
    """The words of a response, and how many tokens its prompt has."""
    content = [*parts, input_text(QUESTION)]
    made = client.responses.create(
        model=server.model,
        input=[{"role": "user", "content": content}],
        max_output_tokens=MAX_TOKENS,
        temperature=0,
        store=False,
    )
    return [made.output_text, made.usage.input_tokens]


class Picture(BaseModel):
    kind: Literal["photo", "drawing"]
    sharp: bool


@calls
def model_list() -> Any:
    return [model.id for model in client.models.list()]


@calls
def chat_of_text() -> Any:
    return chat()


@calls
def chat_with_an_image() -> Any:
    return chat(image(server.data_url()))


@calls
def chat_with_an_image_by_url() -> Any:
    return chat(image(server.photo_url))


@calls
def chat_with_a_document() -> Any:
    file = {"filename": "report.pdf", "file_data": server.pdf_data_url()}
    return chat(*document({"type": "file", "file": file}, "report.pdf"))


@calls
def chat_with_a_document_in_bare_base64() -> Any:
    return chat(*document({"type": "file", "file": {"file_data": server.pdf_base64()}}))


@calls
def chat_with_a_document_that_was_sent_before() -> Any:
    """It is then listed, read and deleted; to chats it is unknown from then on."""
    if not server.takes_documents:
        return chat(*document({}))
    sent = client.files.create(file=("report.pdf", server.pdf.read_bytes()), purpose="user_data")
    part = {"type": "file", "file": {"file_id": sent.id}}
    made = chat(part)
    found = client.files.retrieve(sent.id)
    assert (found.filename, found.bytes, found.purpose) == ("report.pdf", server.pdf.stat().st_size, "user_data")
    assert sent.id in [file.id for file in client.files.list()]
    assert client.files.content(sent.id).read() == server.pdf.read_bytes()
    assert client.files.delete(sent.id).deleted
    assert sent.id not in [file.id for file in client.files.list()]
    try:
        chat(part)
    except NotFoundError:
        return made
    raise AssertionError("the file is still there")


@calls
def response_with_a_document() -> Any:
    return [
        answered(*server.document(part, input_text, input_image, name))
        for part, name in (
            ({"type": "input_file", "filename": "report.pdf", "file_data": server.pdf_data_url()}, "report.pdf"),
            ({"type": "input_file", "file_url": server.pdf_url}, ""),
        )
    ]


@calls
def chat_with_two_answers() -> Any:
    return chat(image(server.data_url()), n=2, temperature=0.8, seed=7)


@calls
def chat_with_logprobs() -> Any:
    return chat(image(server.data_url()), logprobs=True, top_logprobs=3)


@calls
def chat_with_a_stop_string() -> Any:
    return chat(stop=["e"], max_tokens=40)


@calls
def stream_with_usage() -> Any:
    return chat(image(server.data_url()), stream=True, stream_options={"include_usage": True})


@calls
def stream_of_two_answers_with_logprobs() -> Any:
    return chat(stream=True, n=2, temperature=0.8, seed=7, logprobs=True, top_logprobs=2)


@calls
def stream_put_together_by_the_client() -> Any:
    with client.chat.completions.stream(
        model=server.model, messages=asked(), max_tokens=MAX_TOKENS, temperature=0
    ) as s:
        kinds = sorted({event.type for event in s})
        return [kinds, dumped(s.get_final_completion())]


@calls
def tools_offered() -> Any:
    return chat(image(server.data_url()), tools=TOOLS, tool_choice="auto")


@calls
def tool_forced() -> Any:
    return chat(image(server.data_url()), tools=TOOLS, tool_choice=FORCED, **WRITTEN)


@calls
def tool_required() -> Any:
    return chat(tools=TOOLS, tool_choice="required", **WRITTEN)


@calls
def stream_of_a_forced_tool() -> Any:
    return chat(tools=TOOLS, tool_choice=FORCED, stream=True, **WRITTEN)


@calls
def result_of_a_tool() -> Any:
    call = {"id": "call_1", "type": "function", "function": {"name": "describe", "arguments": '{"colour": "red"}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "It is red."}
    return chat(messages=[*asked(image(server.data_url())), said, result], tools=TOOLS)


@calls
def json_schema() -> Any:
    return chat(image(server.data_url()), response_format=FORMAT, **WRITTEN)


@calls
def json_schema_parsed_by_the_client() -> Any:
    made = client.chat.completions.parse(
        model=server.model, messages=asked(), response_format=Picture, temperature=0, **WRITTEN
    )
    return made.choices[0].message.parsed.model_dump()


@calls
def stream_of_a_json_schema() -> Any:
    return chat(response_format=FORMAT, stream=True, **WRITTEN)


@calls
def json_cut_off_while_the_client_parses() -> Any:
    client.chat.completions.parse(
        model=server.model, messages=asked(), response_format=Picture, max_tokens=1, temperature=0
    )


@calls
def completion() -> Any:
    return dumped(
        client.completions.create(model=server.model, prompt="A photograph", max_tokens=MAX_TOKENS, temperature=0)
    )


@calls
def stream_of_a_completion() -> Any:
    made = client.completions.create(
        model=server.model, prompt=["A photograph", "The"], max_tokens=MAX_TOKENS, temperature=0, stream=True
    )
    return stream(map(dumped, made))


def respond(**options: Any) -> Any:
    """A response to a question about an image, or its events."""
    content = [
        {"type": "input_text", "text": QUESTION},
        {"type": "input_image", "image_url": server.data_url(), "detail": "auto"},
    ]
    made = client.responses.create(
        **{
            "model": server.model,
            "input": [{"role": "user", "content": content}],
            "max_output_tokens": MAX_TOKENS,
            "temperature": 0,
            **options,
        }
    )
    return stream(map(dumped, made)) if options.get("stream") else [made.output_text, dumped(made)]


@calls
def response() -> Any:
    return respond()


@calls
def response_to_text() -> Any:
    return respond(input="What is a photograph?", instructions="Be brief.")


@calls
def stream_of_a_response() -> Any:
    return respond(stream=True)


@calls
def response_by_a_json_schema() -> Any:
    made = client.responses.parse(
        model=server.model, input=QUESTION, text_format=Picture, max_output_tokens=150, temperature=0
    )
    return made.output_parsed.model_dump()


@calls
def response_with_a_tool() -> Any:
    return respond(tools=[{"type": "function", **TOOL, "strict": False}], tool_choice="required", max_output_tokens=150)


@calls
def response_that_was_not_stored() -> Any:
    client.responses.retrieve("resp_1")


@calls
def raw_response() -> Any:
    made = client.chat.completions.with_raw_response.create(model=server.model, messages=asked(), max_tokens=1)
    return [made.status_code, made.headers["content-type"], type(made.parse()).__name__]


@calls
def asynchronous_client() -> Any:
    async def several() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as other:
            ask = {"model": server.model, "max_tokens": MAX_TOKENS, "temperature": 0}
            seen, streamed = await asyncio.gather(
                other.chat.completions.create(messages=asked(image(server.photo_url)), **ask),
                other.chat.completions.create(messages=asked(), stream=True, **ask),
            )
            return [dumped(seen), stream([dumped(chunk) async for chunk in streamed])]

    return asyncio.run(several())


@calls
def unknown_model() -> Any:
    chat(model="no-such-model")


@calls
def unknown_model_by_name() -> Any:
    client.models.retrieve("no-such-model")


@calls
def temperature_below_zero() -> Any:
    chat(temperature=-1)


@calls
def prompt_too_long() -> Any:
    chat(words=TOO_LONG)


@calls
def stream_of_a_prompt_too_long() -> Any:
    chat(words=TOO_LONG, stream=True)


@calls
def too_many_images() -> Any:
    chat(*[image(server.data_url())] * 9)


@calls
def broken_image() -> Any:
    chat(image(server.broken_url()))


@calls
def stream_with_a_broken_image() -> Any:
    chat(image(server.broken_url()), stream=True)


@calls
def image_that_is_not_there() -> Any:
    chat(image(server.missing_url))


@calls
def chat_with_an_image_sent_as_a_file() -> Any:
    file = {"type": "file", "file": {"file_data": server.data_url(), "filename": "photo.jpg"}}
    return chat(file if server.takes_documents else image(server.data_url()))


@calls
def schema_that_is_none() -> Any:
    chat(response_format={"type": "json_schema", "json_schema": {"name": "none", "schema": {"type": "nothing"}}})


@calls
def tool_that_is_not_offered() -> Any:
    chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "sing"}})


@calls
def embeddings_of_a_generating_model() -> Any:
    client.embeddings.create(model=server.model, input="A photograph")


@calls
def timeout_of_the_client() -> Any:
    client.with_options(timeout=1).chat.completions.create(
        model=server.model, messages=asked(), max_tokens=LONG_ANSWER, n=4, extra_body={"ignore_eos": True}
    )


@calls
def stream_that_the_client_leaves() -> Any:
    made = client.chat.completions.create(
        model=server.model,
        messages=asked(image(server.data_url())),
        max_tokens=LONG_ANSWER,
        n=4,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    with made:
        next(made)
    return "left"


@calls
def connection_refused() -> Any:
    OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0).models.list()


if __name__ == "__main__":
    calls.print_all()
