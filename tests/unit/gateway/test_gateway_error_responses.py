"""Our errors in the format of each API, replacing the app's responses."""

import json

import pytest

from medialane.gateway import References, RequestScope
from medialane.gateway.http import ErrorSender, error_form
from medialane.gateway.intake import ExtractedMedia
from medialane.types.errors import InvalidImage, MediaTooLarge, NoWorkerReady, PromptRejected, UnsupportedMediaType
from medialane.types.media import Alias, MediaRef

CHAT, RESPONSES, MESSAGES, COUNT = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
BUSY = NoWorkerReady("no worker", retry_after_s=5)
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


class Answer:
    """The app's response as the client receives it, chunk by chunk."""

    def __init__(self, path=CHAT, **scope):
        self.request = RequestScope()
        self.sent = []
        self.sender = ErrorSender(self._send, self.request, error_form({"path": path, **scope}))

    async def _send(self, message):
        self.sent.append(message)

    async def start(self, status=200, headers=()):
        await self.sender({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def piece(self, body, more=True):
        await self.sender({"type": "http.response.body", "body": body, "more_body": more})

    async def whole(self, status, body):
        await self.start(status)
        await self.piece(body, more=False)

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def headers(self):
        return dict(self.sent[0]["headers"])

    @property
    def body(self):
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def json(self):
        return json.loads(self.body)


def openai(error):
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


@pytest.mark.parametrize("status", [400, 500, 501])
async def test_status_code_and_retry_after_come_from_the_error(status):
    answer = Answer()
    answer.request.fail(BUSY)
    await answer.whole(status, b'{"error": "what the app made of it"}')
    assert (answer.status, answer.headers[b"retry-after"], answer.json) == (503, b"5", openai(BUSY))
    assert answer.headers[b"content-length"] == str(len(answer.body)).encode()


ANTHROPIC_TYPES = {
    InvalidImage: "invalid_request_error",
    UnsupportedMediaType: "invalid_request_error",
    MediaTooLarge: "request_too_large",
    NoWorkerReady: "overloaded_error",
}


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize("error", ANTHROPIC_TYPES)
async def test_error_has_anthropics_format_at_its_endpoints(path, error):
    answer = Answer(path)
    answer.request.fail(error("wrong", param="messages[0].content[1]"))
    await answer.whole(500, b"{}")
    assert answer.status == error.status
    assert answer.json["type"] == "error"
    assert answer.json["error"] == {
        "type": ANTHROPIC_TYPES[error],
        "message": "wrong",
        "code": error.code,
        "param": "messages[0].content[1]",
    }


async def test_endpoint_is_recognised_below_a_root_path():
    answer = Answer("/vllm/v1/messages", root_path="/vllm/")
    answer.request.fail(BUSY)
    await answer.whole(500, b"{}")
    assert answer.json["type"] == "error"


async def test_error_has_coheres_format_at_its_endpoint():
    answer = Answer("/cohere/v2/chat")
    answer.request.fail(BUSY)
    await answer.whole(500, b"{}")
    assert answer.json["message"] == "no worker"


@pytest.mark.parametrize("status", [200, 400])
async def test_successful_response_is_unchanged(status):
    answer = Answer()
    await answer.whole(status, b'{"error": "the app\'s own"}')
    assert (answer.status, answer.body) == (status, b'{"error": "the app\'s own"}')


async def test_worker_rejection_is_formatted_by_the_app():
    answer = Answer()
    answer.request.fail(PromptRejected("too long"), app_responds=True)
    await answer.whole(400, b'{"error": "as vLLM has it"}')
    assert answer.body == b'{"error": "as vLLM has it"}'


async def test_stream_failing_before_its_first_event_has_the_error_status():
    answer = Answer()
    await answer.start(headers=STREAM)
    assert answer.sent == []
    answer.request.fail(BUSY)
    await answer.piece(b'data: {"error": {"code": 503}}\n\n')
    await answer.piece(b"data: [DONE]\n\n", more=False)
    assert (answer.status, answer.headers[b"retry-after"], answer.json) == (503, b"5", openai(BUSY))
    assert len(answer.sent) == 2


async def test_response_starts_with_its_first_piece():
    answer = Answer()
    await answer.start(headers=[(b"content-type", b"application/json")])
    assert answer.sent == []
    await answer.piece(b"{")
    await answer.piece(b"}", more=False)
    assert (answer.status, answer.body) == (200, b"{}")


LONG = "https://example.com/" + "x" * 100
REFS = (
    MediaRef("image", "a", url=LONG),
    MediaRef("audio", "b", data=bytes(200), media_type="audio/wav"),
    MediaRef("video", "c", alias=Alias('my "uuid"', "video")),
)


@pytest.mark.parametrize("status", [200, 400, 422, 500])
async def test_apps_message_quotes_what_the_client_sent(status):
    answer = Answer()
    answer.request.extracted = ExtractedMedia(REFS)
    texts = [answer.request.references.text(n) for n in range(4)]
    sent = {"error": {"message": f"not {texts[0]}, data:audio/wav;base64,{texts[1]}, {texts[2]}, {texts[3]}"}}
    body = json.dumps(sent).encode()
    await answer.start(status, headers=[(b"content-length", str(len(body)).encode())])
    await answer.piece(body, more=False)
    quoted = f"data:audio/wav;base64,{'A' * 58}..."
    assert answer.json["error"]["message"] == f'not {LONG[:80]}..., {quoted}, my "uuid", {texts[3]}'
    assert answer.headers[b"content-length"] == str(len(answer.body)).encode()


@pytest.mark.parametrize(("status", "shown"), [(400, "confirmed..., 'a...'"), (200, "confirmed..., 'amedialane...'")])
async def test_fragments_of_references_are_removed_from_errors_only(status, shown):
    answer = Answer()
    answer.request.extracted = ExtractedMedia(REFS)
    await answer.whole(status, b'{"message": "confirmed..., \'amedialane...\'"}')
    assert answer.json["message"] == shown


async def test_no_abridgement_shows_a_reference():
    references = References("medialane:Qx7Zk9Wv2Jpq:")
    value, token = f"{{'image_url': '{references.text(0)}'}}", references.prefix.split(":")[1]
    for start in range(len(value)):
        for end in range(start + 1, len(value)):
            document = f"{value[:start]}...{value[end:]}".encode()
            shown = references.quoting_client(document, REFS[:1], is_error=True).decode()
            assert "medial" not in shown
            assert not [n for n in range(len(token) - 1) if token[n : n + 2] in shown], shown


async def test_streams_event_quotes_what_the_client_sent():
    answer = Answer()
    answer.request.extracted = ExtractedMedia((MediaRef("image", "a", url="http://a/"),))
    await answer.start(headers=STREAM)
    await answer.piece(b'data: {"error": {"message": "not %b"}}\n\n' % answer.request.references.text(0).encode())
    assert answer.body == b'data: {"error": {"message": "not http://a/"}}\n\n'


@pytest.mark.parametrize(
    ("path", "theirs", "own"),
    [
        (CHAT, b'data: {"error": {"code": 503, "message": "m"}}', b"data: " + json.dumps(openai(BUSY)).encode()),
        (
            MESSAGES,
            b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"m"}}',
            b'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error", "message": "no worker", '
            b'"code": "no_worker_ready"}}',
        ),
        (
            "/cohere/v2/chat",
            b'data: {"type": "message-end", "delta": {"error": "m", "finish_reason": "ERROR"}}',
            b'data: {"type": "message-end", "delta": {"error": "no worker", "finish_reason": "ERROR"}}',
        ),
    ],
)
async def test_only_the_error_event_of_a_stream_is_replaced(path, theirs, own):
    answer = Answer(path)
    await answer.start(headers=STREAM)
    first = b'data: {"choices": [{"delta": {"content": "error"}}]}\n\n'
    await answer.piece(first)
    answer.request.fail(BUSY)
    await answer.piece(first + theirs + b"\n\n")
    await answer.piece(b"data: [DONE]\n\n", more=False)
    assert answer.status == 200
    assert answer.body == first + first + own + b"\n\ndata: [DONE]\n\n"


async def test_stream_aborted_by_the_app_ends_with_the_error():
    """vLLM's responses do so: it cannot read its own error as one of their events."""
    answer = Answer(RESPONSES)
    await answer.start(headers=STREAM)
    await answer.piece(b'event: a\ndata: {"type":"a","sequence_number":4}\n\n')
    answer.request.fail(BUSY)
    assert await answer.sender.fail_stream(ValueError("broken"))
    *_, event, _ = answer.body.split(b"\n\n")
    kind, data = event.split(b"\n")
    assert kind == b"event: error"
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "code": "no_worker_ready",
        "message": "no worker",
        "param": None,
        "sequence_number": 5,
    }
    assert not answer.sent[-1].get("more_body", False)


async def test_app_failing_before_its_response_gets_an_error_response():
    answer = Answer()
    answer.request.fail(BUSY)
    assert await answer.sender.fail_stream(ValueError("broken"))
    assert (answer.status, answer.json) == (503, openai(BUSY))


async def test_unrelated_exception_propagates():
    answer = Answer()
    assert not await answer.sender.fail_stream(ValueError("a bug"))
    await answer.start(headers=[(b"content-length", b"9")])
    await answer.piece(b"half")
    answer.request.fail(BUSY)
    assert not await answer.sender.fail_stream(ValueError("within an answer of known length"))
    assert len(answer.sent) == 2
