"""Questions about a PDF in the forms of three APIs are answered as plain vLLM answers about the texts and images of its
pages, and a page is rendered once."""

import base64

import pytest
from openai_http import CHAT, assert_same, chat, data_url

from medialane.testing.sample_media import sample_pdf
from medialane.tools.check.media import as_images

pytestmark = pytest.mark.vllm

MAX_TOKENS = 8


def paper(seed):
    """A document of two small pages."""
    return sample_pdf([f"page {n} of paper {seed}\nwith two lines" for n in (1, 2)], width=298, height=420)


def file(data):
    return {"type": "file", "file": {"file_data": data_url(data, "application/pdf"), "dpi": 96}}


def as_chat(data):
    return [file(data)], as_images([file(data)])


def as_responses(data):
    ours = [{"type": "input_file", **file(data)["file"]}]
    plain = [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "detail": "auto", "image_url": part["image_url"]["url"]}
        for part in as_images([file(data)])
    ]
    return ours, plain


def as_messages(data):
    source = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(data).decode(), "dpi": 96}
    plain = [
        part if part["type"] == "text" else {"type": "image", "source": {"type": "base64", **image(part)}}
        for part in as_images([file(data)])
    ]
    return [{"type": "document", "source": source}], plain


def image(part):
    return {"media_type": "image/png", "data": part["image_url"]["url"].partition(",")[2]}


def body(path, content, **options):
    """A question about these parts."""
    name = "input_text" if path == "/v1/responses" else "text"
    message = {"role": "user", "content": [*content, {"type": name, "text": "What is it about?"}]}
    if path == "/v1/responses":
        return {"input": [message], "max_output_tokens": MAX_TOKENS, "temperature": 0, **options}
    return {"messages": [message], "max_tokens": MAX_TOKENS, "temperature": 0, **options}


def written(path, answer):
    """What the model has written, and the tokens of the prompt."""
    if path == "/v1/responses":
        return [answer.json["output"], answer.json["usage"]["input_tokens"]]
    if path == "/v1/messages":
        return [answer.json["content"], answer.json["usage"]["input_tokens"]]
    return [answer.json["choices"], answer.json["usage"]["prompt_tokens"]]


FORMS = {CHAT: as_chat, "/v1/responses": as_responses, "/v1/messages": as_messages}


@pytest.mark.parametrize(("number", "path"), list(enumerate(FORMS)))
async def test_document_is_answered_as_its_pages_and_rendered_once(ours, plain, number, path):
    document, pages = FORMS[path](paper(number))
    right = await plain.succeed(body(path, pages), path)
    first = await ours.succeed(body(path, document, medialane={"report": True}), path)
    again = await ours.succeed(body(path, document, medialane={"report": True}), path)
    assert_same(written(path, first), written(path, right))
    assert_same(written(path, again), written(path, right))
    (found,) = first.json["medialane"]["documents"]
    assert (found["num_pages"], found["num_hits"]) == (2, 0)
    (found,) = again.json["medialane"]["documents"]
    assert (found["num_pages"], found["num_hits"]) == (2, 2)
    assert [item["cache"] for item in again.json["medialane"]["items"]] == ["hit", "hit"]
    assert again.copied_bytes == 0


async def test_next_turn_and_next_edition_render_only_what_is_new(ours):
    asked = chat(file(paper(10)), {"type": "text", "text": "What is it about?"}, medialane={"report": True})
    answer = await ours.succeed(asked)
    turns = [answer.json["choices"][0]["message"], {"role": "user", "content": "Who wrote it?"}]
    later = await ours.succeed({**asked, "messages": [*asked["messages"], *turns]})
    assert later.json["medialane"]["documents"][0]["num_hits"] == 2
    texts = [f"page {n} of paper 10\nwith two lines" for n in (1, 2)]
    edition = sample_pdf([*texts, "an appendix"], width=298, height=420)
    newer = await ours.succeed(chat(file(edition), medialane={"report": True}))
    (found,) = newer.json["medialane"]["documents"]
    assert (found["num_pages"], found["num_hits"]) == (3, 2)
