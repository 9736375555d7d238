"""Invalid input gives an error in OpenAI's format naming the field, and the next request succeeds."""

import asyncio
import base64
import json
import re
import socket
import zlib

import pytest
from openai_http import CHAT, MAX_TOKENS, assert_same, chat, data_url, image, photo, picture, text
from picture_server import picture_server

from waiting import eventually

pytestmark = pytest.mark.vllm

ASK = text("What is in the picture?")
#: The second part of the first message, where these tests put the fault.
FIELD = "messages[0].content[1].image_url"


def png_bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    """A PNG of a few bytes that claims billions of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def broken_base64() -> str:
    return "data:image/jpeg;base64," + base64.b64encode(photo(60)).decode()[:-40] + "*" * 40


URLS = {
    "not base64": (broken_base64, 400, "invalid_base64"),
    "base64 that says nothing": (lambda: "data:image/jpeg;base64,", 400, "empty_media"),
    "data URL without base64": (lambda: "data:image/jpeg,abc", 400, "invalid_data_url"),
    "truncated JPEG": (lambda: data_url(photo(60)[:5000]), 400, "invalid_image"),
    "text as an image": (lambda: data_url(b"This is no picture." * 10), 400, "invalid_image"),
    "PDF as an image": (lambda: data_url(b"%PDF-1.7" * 10), 415, "unsupported_media_type"),
    "PNG bomb": (lambda: data_url(png_bomb(), "image/png"), 413, "image_too_large"),
    "unreachable host": (lambda: f"http://127.0.0.1:{closed_port()}/photo.jpg", 502, "media_upstream_error"),
    "unknown host": (lambda: "http://nowhere.invalid/photo.jpg", 502, "media_upstream_error"),
    "private address": (lambda: "http://10.0.0.1/photo.jpg", 400, "media_url_forbidden"),
    "unknown scheme": (lambda: "ftp://example.com/photo.jpg", 400, "unsupported_url_scheme"),
    "file outside the allowed folder": (lambda: "file:///etc/hostname", 400, "media_url_forbidden"),
    "our own scheme": (lambda: "medialane:0", 400, "invalid_media_url"),
    "no URL at all": (lambda: "photo.jpg", 400, "invalid_media_url"),
}


@pytest.mark.parametrize("name", URLS)
async def test_invalid_image_error_names_its_field(ours, name):
    make, status, code = URLS[name]
    answer = await ours.post(chat(ASK, image(make())))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, FIELD), answer.json
    assert "/tmp" not in answer.error["message"]
    assert (await ours.succeed(chat(picture(61), ASK))).ids


async def test_url_not_found_error_names_its_field_and_has_vllms_status(ours, plain):
    async with picture_server({}) as server:
        body = chat(ASK, image(server.url("missing.jpg")))
        answer, right = await ours.post(body), await plain.post(body)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (422, "media_fetch_failed", FIELD)
    assert answer.status == right.status
    assert (await ours.succeed(chat(ASK))).ids


async def test_one_invalid_image_of_three_fails_the_request_without_leaking_leases(ours):
    answer = await ours.post(chat(picture(62), image(data_url(photo(60)[:5000])), picture(63)))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_image", FIELD)

    async def is_free() -> bool:
        """The jobs of the other images may run to completion."""
        return (await ours.metrics()).value("medialane_arena_leases") == 0

    await eventually(is_free, "no hold is left", 20)


async def test_invalid_image_fails_a_streaming_request_with_an_http_status(ours):
    answer = await ours.post(chat(ASK, image(data_url(photo(60)[:5000])), stream=True))
    assert (answer.status, answer.error["code"]) == (400, "invalid_image")


async def test_image_count_over_the_model_limit_gives_plain_vllms_error(ours, plain):
    body = chat(*[picture(64, 64, 64)] * 9)
    answer, right = await ours.post(body), await plain.post(body)
    assert answer.status == right.status == 400
    assert "8 image" in answer.error["message"]
    assert_same(answer.json, right.json)
    assert (await ours.succeed(chat(picture(61), ASK))).ids


async def test_image_count_over_the_request_limit_names_its_field(ours):
    answer = await ours.post(chat(*[picture(64, 64, 64)] * 17))
    assert (answer.status, answer.error["code"]) == (400, "too_many_media_items")
    assert answer.error["param"] == "messages[0].content[16].image_url"


@pytest.mark.parametrize(
    "content", [[text("word " * 9000)], [picture(65), text("word " * 9000)]], ids=["text", "image"]
)
async def test_too_long_prompt_gives_plain_vllms_error(ours, plain, content):
    answer, right = await ours.post(chat(*content)), await plain.post(chat(*content))
    assert answer.status == right.status == 400
    assert_same(answer.json, right.json)
    assert (await ours.succeed(chat(ASK))).ids


async def test_image_exceeding_the_context_length_is_reported(ours, plain):
    """Its text alone would fit: only the expanded placeholder does not."""
    long = text("What is in the picture? " * 680)
    without = await plain.succeed({"messages": chat(long)["messages"]}, "/tokenize")
    assert without.json["count"] + MAX_TOKENS <= without.json["max_model_len"]
    body = chat(picture(66, 1200, 900), long)
    answer, right = await ours.post(body), await plain.post(body)
    assert answer.status == right.status == 400
    assert answer.error["code"] == right.error["code"]
    assert (await ours.succeed(chat(ASK))).ids


BODIES = {
    "not JSON": b'{"messages": [',
    "not an object": b"[1, 2, 3]",
    "nothing": b"",
    "not UTF-8": b'{"model": "\xff"}',
    "no messages": b'{"max_tokens": 3}',
}


@pytest.mark.parametrize("name", BODIES)
async def test_invalid_body_gives_plain_vllms_error(ours, plain, name):
    answer, right = await ours.post(BODIES[name]), await plain.post(BODIES[name])
    assert answer.status == right.status
    assert answer.status in (400, 422)
    assert_same(answer.json, right.json)
    assert (await ours.succeed(chat(ASK))).ids


TOO_MUCH = {
    "nested without end": b"[" * 100_000,
    "tools of many levels": b'{"tools": [' + b",".join([b'{"a":' * 20 + b"1" + b"}" * 20] * 30_000) + b"]}",
    "logit_bias of every token there ever was": b'{"logit_bias": {"1": 1' + b',"1": 1' * 900_000 + b"}}",
}


@pytest.mark.parametrize("name", TOO_MUCH)
async def test_body_too_expensive_to_parse_is_rejected(ours, name):
    answer = await ours.post(TOO_MUCH[name])
    assert (answer.status, answer.error["code"]) == (400, "invalid_body")
    assert (await ours.succeed(chat(ASK))).ids


LENIENT = {
    "UTF-16": lambda text: text.encode("utf-16"),
    "a byte order mark": lambda text: text.encode("utf-8-sig"),
    "a lone surrogate": lambda text: b'{"user": "\\ud800", ' + text[1:].encode(),
    "NaN": lambda text: b'{"unknown": NaN, ' + text[1:].encode(),
}


@pytest.mark.parametrize("name", LENIENT)
async def test_json_that_vllm_accepts_is_accepted_along_with_media(ours, name):
    answer = await ours.post(LENIENT[name](json.dumps(chat(picture(67), ASK))))
    assert answer.status == 200, answer.json


PARAMETERS = {
    "temperature below zero": {"temperature": -1},
    "max_tokens that is no number": {"max_tokens": "many"},
    "too many logprobs": {"logprobs": True, "top_logprobs": 1000},
    "stop that is too deep": {"stop": [["a"]]},
}


async def test_unknown_model_is_refused_as_by_plain_vllm_with_the_served_name_instead_of_a_stand_in(ours, plain):
    body = {**chat(picture(61), ASK), "model": "no-such-model"}
    answer, right = await ours.post(body), await plain.post(body)
    assert (answer.status, answer.json["error"]["code"]) == (right.status, right.json["error"]["code"])
    assert answer.json["error"]["message"].endswith(f"Valid aliases: {ours.model}.")


@pytest.mark.parametrize("name", PARAMETERS)
async def test_invalid_parameter_gives_plain_vllms_error(ours, plain, name):
    body = {**chat(picture(61), ASK), **PARAMETERS[name]}
    answer, right = await ours.post(body), await plain.post(body)
    assert answer.status == right.status
    assert 400 <= answer.status < 500
    assert_same(answer.json, right.json)
    assert (await ours.succeed(chat(ASK))).ids


GRAMMARS = {
    # name: (member of structured_outputs, grammar, whether xgrammar's compiler refuses it)
    "two roots": ("grammar", 'root ::= "a"\nroot ::= "b"', True),
    "a list of items, as in draft 7": (
        "json",
        {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]},
        True,
    ),
    "endless recursion": ("grammar", "root ::= root", False),
    "endless recursion of two rules": ("grammar", "root ::= a\na ::= b\nb ::= a", False),
    "endless $ref": ("json", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, False),
    "$ref to itself": ("json", {"$ref": "#"}, False),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", GRAMMARS)
async def test_grammar_that_the_engine_cannot_compile_names_its_parameter(ours, name, stream):
    """An engine has one compiler, that of its first grammar: xgrammar, if the workers' was that of a choice. vLLM's
    front end has found these grammars valid for another one. Prompts differ, so that all workers get some."""
    kind, grammar, is_refused = GRAMMARS[name]

    def asked(number, **more):
        return chat(text(f"{number} {name} {stream}"), max_tokens=8, **more)

    for number in range(4):
        choices = [asked(f"{number} {n}", structured_outputs={"choice": ["cat", "dog"]}) for n in range(4)]
        await asyncio.gather(*map(ours.succeed, choices))
    bad = [asked(n, stream=stream, structured_outputs={kind: grammar}) for n in range(8)]
    answers = await asyncio.gather(*map(ours.post, bad))
    refused = [answer for answer in answers if answer.status == 400]
    assert {answer.status for answer in answers} <= {200, 400}
    assert refused or not is_refused
    for answer in refused:
        assert answer.json["error"]["code"] == "invalid_grammar"
        assert answer.json["error"]["param"] == f"structured_outputs.{kind}"
        assert "grammar" in answer.json["error"]["message"]
    await ours.succeed(choices[0])


async def test_unsupported_modality_error_names_its_field(ours):
    part = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    answer = await ours.post(chat(ASK, part))
    assert answer.status in (400, 415)
    assert answer.error["param"] == "messages[0].content[1].video_url"


async def test_api_key_is_checked_before_the_body_is_read(gateways):
    """Headers that declare a body of 50 MB, and no body: the response arrives nevertheless."""
    status, _ = await announced(gateways["features/shm"], 50_000_000)
    assert status == 401


async def test_valid_api_key_is_accepted(gateways):
    with_key = gateways["features/shm"]
    without = type(with_key)(with_key.base_url, with_key.model)
    wrong = type(with_key)(with_key.base_url, with_key.model, api_key="guessed")
    assert [(await client.post(chat(ASK))).status for client in (without, wrong)] == [401, 401]
    assert (await with_key.succeed(chat(ASK))).ids


async def test_body_over_the_limit_is_rejected_by_content_length(ours):
    status, body = await announced(ours, 65 << 20)
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")


async def announced(client, num_bytes: int) -> tuple[int, bytes]:
    """Status and body of the response to headers that declare a body which never arrives."""
    host, _, port = client.base_url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        headers = ("Host: " + host, "Content-Type: application/json", f"Content-Length: {num_bytes}")
        writer.write("\r\n".join([f"POST {CHAT} HTTP/1.1", *headers, "", ""]).encode())
        async with asyncio.timeout(20):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            (length,) = re.findall(r"content-length: (\d+)", head)
            return int(head.split()[1]), await reader.readexactly(int(length))
    finally:
        writer.close()
        await writer.wait_closed()
