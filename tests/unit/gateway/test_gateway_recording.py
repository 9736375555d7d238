"""What a gateway records of its traffic, and that recording never gets in the way of requests."""

import asyncio
import base64
import json
import logging
import os
import stat
import time

import pytest
from prometheus_client import CollectorRegistry

from intakes import Intake
from medialane.gateway import Recorder, RecordingConfig, ScopeMiddleware, current_scope, parse_stand_in
from medialane.gateway.records import MAX_PENDING_BYTES
from medialane.observability import Metrics
from medialane.types.errors import StartupFailed
from medialane.types.media import DocumentPage, OpenedDocument, PageIo
from waiting import eventually

CHAT = "/v1/chat/completions"
JSON = (b"content-type", b"application/json")
SECRET = "sk-do-not-record-me"
PNG = b"\x89PNG one image"
OTHER = b"\x89PNG another one"


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts, **members):
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **members}


def text(words):
    return {"type": "text", "text": words}


async def two_pages(ref, options):
    pages = tuple(DocumentPage(PageIo("d", 200, n, "r", 100), f"page {n}") for n in (1, 2))
    return OpenedDocument("c" * 64, 2, pages)


class RecordingGateway:
    """The middleware of a gateway that records to a file, in front of an app that answers at once."""

    def __init__(self, file, *, max_pending_bytes=MAX_PENDING_BYTES, **settings):
        self.file = file
        config = RecordingConfig(file=str(file), **settings)
        self.recorder = Recorder.open(config, max_pending_bytes=max_pending_bytes)
        self._intake = Intake(self._app, keeps_bodies=True, open_document=two_pages)
        self._stack = ScopeMiddleware(self._intake, Metrics(CollectorRegistry()), recorder=self.recorder)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.recorder.close()
        self._intake.close()

    @staticmethod
    async def _app(scope, receive, send):
        await receive()
        current_scope().record.path = scope["path"]
        await send({"type": "http.response.start", "status": 200, "headers": [JSON]})
        await send({"type": "http.response.body", "body": b"{}"})

    async def post(self, body, *, path=CHAT, headers=(), content_type=b"application/json"):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        messages = [{"type": "http.request", "body": raw, "more_body": False}]
        sent = []

        async def receive():
            if not messages:
                await asyncio.Event().wait()
            return messages.pop(0)

        async def send(message):
            sent.append(message)

        all_headers = [(b"content-type", content_type), (b"authorization", f"Bearer {SECRET}".encode()), *headers]
        await self._stack({"type": "http", "method": "POST", "path": path, "headers": all_headers}, receive, send)
        return sent[0]["status"]


async def recorded(file, *bodies, path=CHAT, **settings):
    """The lines of a recording of these requests."""
    async with RecordingGateway(file, **settings) as gateway:
        for body in bodies:
            await gateway.post(body, path=path)
    return lines(file)


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "traffic.jsonl"


async def test_line_is_one_of_a_batch_file_with_what_was_observed(file):
    async with RecordingGateway(file) as gateway:
        await gateway.post(chat(text("hello"), max_tokens=3), headers=[(b"x-request-id", b"mine")])
    (line,) = lines(file)
    assert (line["custom_id"], line["method"], line["url"]) == ("mine", "POST", CHAT)
    assert line["body"] == chat(text("hello"), max_tokens=3)
    assert line["medialane"]["status"] == 200
    assert abs(line["medialane"]["at"] - time.time()) < 60


async def test_equal_media_have_equal_stand_ins(file):
    body = chat(image(data_url(PNG)), image(data_url(OTHER)), image(data_url(PNG)))
    (line,) = await recorded(file, body)
    first, second, third = (parse_stand_in(part["image_url"]["url"]) for part in line["body"]["messages"][0]["content"])
    assert first == third != second
    assert (first.modality, first.num_bytes) == ("image", len(PNG))
    assert base64.b64encode(PNG).decode() not in file.read_text()


async def test_large_media_are_whole_in_one_line(file):
    body = chat(image(data_url(bytes(range(256)) * 5000)), image(data_url(PNG)))
    (line,) = await recorded(file, body, media="whole")
    assert line["body"] == body


async def test_whole_media_are_as_they_were_sent(file):
    audio = {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"RIFF").decode(), "format": "wav"}}
    body = chat(image(data_url(PNG)), image("https://host.example/a.png"), audio)
    (line,) = await recorded(file, body, media="whole")
    assert line["body"] == body


@pytest.mark.parametrize("media", ["hash", "whole"])
async def test_document_is_recorded_as_images_for_its_pages(file, media):
    part = {"type": "file", "file": {"filename": "a.pdf", "file_data": data_url(b"%PDF-1.7", "application/pdf")}}
    (line,) = await recorded(file, chat(part, text("?")), media=media)
    first, one, second, two, question = line["body"]["messages"][0]["content"]
    assert [first, second, question] == [text("a.pdf\npage 1\n"), text("page 2\n"), text("?")]
    stand_ins = [parse_stand_in(each["image_url"]["url"]) for each in (one, two)]
    assert [each.modality for each in stand_ins] == ["image", "image"]
    assert stand_ins[0].key != stand_ins[1].key


@pytest.mark.parametrize("url", ["https://host.example/a.png?sig=abc", "https://me:pw@host.example/a.png"])
async def test_url_that_may_have_a_secret_is_not_recorded(file, url):
    (line,) = await recorded(file, chat(image(url)), media="whole")
    assert parse_stand_in(line["body"]["messages"][0]["content"][0]["image_url"]["url"]).modality == "image"
    assert "sig" not in file.read_text()
    assert "pw@" not in file.read_text()


async def test_no_header_key_or_salt_is_recorded(file):
    server = {"type": "mcp", "server_url": "https://t", "headers": {"X-Key": SECRET}, "authorization": SECRET}
    function = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"password": {}}}}}
    body = chat(text("hi"), image(data_url(PNG)), cache_salt=SECRET, tools=[server, function], api_key=SECRET)
    (line,) = await recorded(file, body)
    assert SECRET not in file.read_text()
    assert line["body"]["tools"][0] == {"type": "mcp", "server_url": "https://t"}
    assert line["body"]["tools"][1] == function
    assert line["body"]["cache_salt"]


URLS = {
    "https://me:SECRET@host.example/a": "https://host.example/a",
    "https://host.example/a?X-Amz-Signature=SECRET": "https://host.example/a",
    "wss://host.example?t=SECRET#x": "wss://host.example",
    "https://host.example/#access_token=SECRET": "https://host.example/",
    "see (postgres://u:SECRET@db/x) and s3://b/k?sig=SECRET, please": "see (postgres://db/x) and s3://b/k please",
    "https://json-schema.org/draft-07/schema#": "https://json-schema.org/draft-07/schema#",
    "https://host.example/schema#/definitions/a": "https://host.example/schema#/definitions/a",
    "no URL: a?b#c@d": "no URL: a?b#c@d",
}


@pytest.mark.parametrize("given", URLS)
async def test_urls_are_recorded_without_passwords_queries_and_fragments(file, given):
    parts = {"type": "item_reference", "place": given}, {"type": "text", "text": given}
    body = {"model": "m", "input": [{"role": "user", "content": list(parts)}], "metadata": {"note": given}}
    (line,) = await recorded(file, body, path="/v1/responses")
    recorded_body = line["body"]
    assert [recorded_body["input"][0]["content"][0]["place"], recorded_body["metadata"]["note"]] == [URLS[given]] * 2
    assert "SECRET" not in file.read_text()


@pytest.mark.parametrize("name", ["server_url", "webhook_url", "endpoint", "callback_uri"])
async def test_url_of_a_service_is_recorded_without_its_path(file, name):
    """It is the key of some: whoever has it may use them."""
    tool = {"type": "mcp", name: "https://me:SECRET@mcp.example:8443/api/SECRET/mcp?key=SECRET"}
    (line,) = await recorded(file, chat(text("hi"), tools=[tool]))
    assert line["body"]["tools"] == [{"type": "mcp", name: "https://mcp.example:8443"}]


@pytest.mark.parametrize("repeated", ["://", "https://", "://a@", "@", "?", "#", "a", "://?#"])
async def test_redaction_of_urls_takes_linear_time(file, repeated):
    body = chat(text("://" + repeated * 200_000), server_url=repeated * 200_000)
    began = time.process_time()
    await recorded(file, body)
    assert time.process_time() - began < 2.0


async def test_redacted_text_keeps_lengths_and_common_beginnings_alone(file):
    prompts = ["You are helpful.\nThe patient Ada Lovelace coughs", "You are helpful.\nThe patient Bob Smith sneezes"]
    first, second = await recorded(file, *(chat(text(each), user="lovelace") for each in prompts), redact="text")
    one, other = (line["body"]["messages"][0]["content"][0]["text"] for line in (first, second))
    assert [len(word) for word in one.split()] == [len(word) for word in prompts[0].split()]
    same = [a == b for a, b in zip(one.split(), other.split(), strict=True)]
    assert same == [True] * 5 + [False] * 3
    assert not set(prompts[0].split()) & set(one.split())
    assert first["body"]["messages"][0]["role"] == "user"
    assert "lovelace" not in file.read_text().lower()


async def test_redacted_token_ids_keep_common_beginnings(file):
    first, second = await recorded(
        file, {"model": "m", "prompt": [5, 6, 7]}, {"model": "m", "prompt": [5, 6, 9]}, path="/v1/completions",
        redact="text",
    )  # fmt: skip
    one, other = first["body"]["prompt"], second["body"]["prompt"]
    assert one[:2] == other[:2]
    assert one != other
    assert one != [5, 6, 7]


async def test_conversation_is_recorded_whole_or_not_at_all(file):
    def turn(conversation, number):
        content = [text(f"question {conversation}"), image(data_url(PNG))]
        messages = [{"role": "user", "content": content}]
        messages += [{"role": "assistant", "content": "answer"}, {"role": "user", "content": "and?"}] * number
        return {"model": "m", "messages": messages}

    bodies = [turn(conversation, number) for number in range(3) for conversation in range(40)]
    found = await recorded(file, *bodies, share=0.5)
    numbers = [line["body"]["messages"][0]["content"][0]["text"] for line in found]
    assert 5 < len(set(numbers)) < 35
    assert all(numbers.count(name) == 3 for name in numbers)


async def test_form_is_recorded_as_in_a_batch_file(file):
    form = (
        b'--x\r\nContent-Disposition: form-data; name="language"\r\n\r\nen\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFFsound\r\n--x--\r\n'
    )
    async with RecordingGateway(file, media="whole") as gateway:
        await gateway.post(form, path="/v1/audio/transcriptions", content_type=b"multipart/form-data; boundary=x")
    (line,) = lines(file)
    assert line["body"]["language"] == "en"
    assert base64.b64decode(line["body"]["file_url"].partition(",")[2]) == b"RIFFsound"


async def test_requests_of_operators_are_not_recorded(file):
    assert await recorded(file, {"lora_name": "a"}, path="/v1/load_lora_adapter") == []


async def test_gateways_append_to_one_file_with_one_key(file):
    bodies = [chat(image(data_url(PNG))), chat(image(data_url(PNG)))]
    async with RecordingGateway(file) as one, RecordingGateway(file) as other:
        await one.post(bodies[0])
        await other.post(bodies[1])
    first, second = (line["body"]["messages"][0]["content"][0]["image_url"]["url"] for line in lines(file))
    assert first == second
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((file.parent / "traffic.jsonl.key").stat().st_mode) == 0o600


async def test_recording_ends_at_its_limit_and_requests_go_on(file, caplog):
    async with RecordingGateway(file, max_bytes=2000) as gateway:
        for _ in range(30):
            assert await gateway.post(chat(text("a word"))) == 200
    assert 0 < file.stat().st_size <= 2000
    assert "recording has ended: the file has reached --record-max-bytes" in caplog.text
    assert all(line["url"] == CHAT for line in lines(file))


async def test_full_disk_ends_the_recording_and_no_request(file, caplog):
    file.symlink_to("/dev/full")
    async with RecordingGateway(file) as gateway:
        assert await gateway.post(chat(text("a"))) == 200
        await eventually(lambda: "No space left on device" in caplog.text, "the recording has ended")
        assert await gateway.post(chat(text("b"))) == 200


async def test_disk_that_hangs_holds_up_nothing_and_bounds_what_waits(file, caplog):
    caplog.set_level(logging.INFO)
    os.mkfifo(file)
    reader = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that nobody reads: its 64 KiB are soon full
    body = json.dumps(chat(image(data_url(b"\x89PNG" + bytes(200_000))))).encode()
    async with RecordingGateway(file, media="whole", max_pending_bytes=1 << 20) as gateway:
        for _ in range(10):
            assert await gateway.post(body) == 200
        assert "requests are left out, the first because more end than can be written" in caplog.text
        os.close(reader)  # the write fails


def test_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(StartupFailed, match=r"--record .*/none/t\.jsonl: No such file or directory"):
        Recorder.open(RecordingConfig(file=str(tmp_path / "none" / "t.jsonl")))


def test_without_a_file_there_is_no_recorder():
    assert Recorder.open(RecordingConfig()) is None


@pytest.mark.parametrize(("settings", "message"), [({"share": 1.5}, "share must be"), ({"max_bytes": 0}, "max_bytes")])
def test_invalid_setting_is_named(settings, message):
    with pytest.raises(StartupFailed, match=message):
        RecordingConfig(**settings).validate()
