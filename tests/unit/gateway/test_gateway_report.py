"""The report in a response: spliced into its bytes however chunked, and read by OpenAI's client."""

import asyncio
import json
from pathlib import Path

import httpx2
import jsonschema
import msgspec
import openai
import pytest

from medialane.gateway import (
    HandoverPath,
    InlineTransport,
    PullTransport,
    ShmTransport,
    open_scope,
)
from medialane.gateway.records import ReportSender, embedding_outcome, report_schema, request_report, request_view
from medialane.types.feature import Feature, MediaSpan, StagedItem
from medialane.types.media import PDF_TYPE, STAGES, MediaRef, MediaSize
from medialane.types.request import Alternative, CostParts, OutputDelta, RoutingDecision

REPORT = b'{"items":[{"param":"x"}]}'
REPORT_FIELDS = json.loads(REPORT)

ANSWER = {"id": "c", "choices": [{"message": {"content": 'a } "medialane" {'}}], "usage": {"total_tokens": 3}}


def chunk(text, **fields):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    document = {
        "id": "c1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m",
        "choices": [choice],
        **fields,
    }
    return f"data: {json.dumps(document)}\n\n".encode()


USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
EVENTS = [
    chunk("a"),
    chunk("data: [DONE]"),
    chunk("", choices=[], usage=USAGE, system_fingerprint="f"),
    b"data: [DONE]\n\n",
]


class SentMessages(list):
    async def __call__(self, message):
        self.append(message)

    @property
    def headers(self):
        return dict(self[0]["headers"])

    @property
    def body(self):
        return b"".join(message["body"] for message in self[1:])


STREAM = b"text/event-stream; charset=utf-8"


async def spliced(pieces, kind=b"application/json", *, ends=True):
    """Return what is sent for each piece of a response, and at its end."""
    sent = SentMessages()
    send = ReportSender(sent, lambda: REPORT)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    if ends:
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    return [message["body"] for message in sent[1:]]


def cut(data, size):
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("answer", [ANSWER, {}, {"a": {}}, {"a": "{"}, {"a": [{}]}], ids=str)
@pytest.mark.parametrize("indent", [None, 1])
async def test_report_is_a_member_of_the_response_object(answer, size, indent):
    data = json.dumps(answer, indent=indent).encode() + b"\n "
    assert json.loads(b"".join(await spliced(cut(data, size)))) == {
        **answer,
        "medialane": REPORT_FIELDS,
    }


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("data", [b"[{}]", b'"}"', b"3", b"", b"not } json"])
async def test_non_object_response_is_unchanged(data, size):
    assert b"".join(await spliced(cut(data, size))) == data


async def test_chunked_response_is_not_buffered():
    piece = b'{"a":"' + b"x" * 5000
    assert await spliced([piece], ends=False) == [piece]


def events_of(data):
    return [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: {")]


@pytest.mark.parametrize("pieces", [EVENTS, [b"".join(EVENTS)], [*EVENTS[:2], b"".join(EVENTS[2:])]])
async def test_report_is_the_last_event_before_done(pieces):
    out = b"".join(await spliced(pieces, STREAM))
    assert out.startswith(b"".join(EVENTS[:-1]))
    assert out.endswith(b"\n\ndata: [DONE]\n\n")
    *chunks, last = events_of(out)
    assert chunks == events_of(b"".join(EVENTS))
    assert last == {
        "id": "c1",
        "created": 7,
        "model": "m",
        "system_fingerprint": "f",
        "usage": USAGE,
        "object": "medialane.report",
        "choices": [],
        "medialane": REPORT_FIELDS,
    }


@pytest.mark.parametrize("at", range(1, len(b"data: [DONE]\n\n")))
async def test_report_is_before_an_end_marker_that_is_split(at):
    whole = await spliced(EVENTS, STREAM)
    end = EVENTS[-1]
    pieces = await spliced([*EVENTS[:-1], end[:at], end[at:]], STREAM)
    assert b"".join(pieces) == b"".join(whole)


async def test_beginning_of_an_end_marker_is_sent_at_the_end():
    assert b"".join(await spliced([b"data: 1\n\ndata: [DO"], STREAM)).startswith(b"data: 1\n\ndata: [DO")


async def test_stream_events_are_forwarded_immediately():
    assert await spliced(EVENTS[:3], STREAM, ends=False) == EVENTS[:3]


async def test_done_marker_in_model_output_does_not_end_the_stream():
    pieces = [b'data: {"a":"', b'data: [DONE]"}\n\n']
    assert await spliced(pieces, STREAM, ends=False) == pieces


@pytest.mark.parametrize("before", [[], [b": comment\n\n"], [b"data: not json\n\n"], [b"data: [1]\n\n"]])
async def test_report_is_sent_without_a_preceding_chunk(before):
    out = b"".join(await spliced([*before, b"data: [DONE]\n\n"], STREAM))
    assert events_of(out) == [{"object": "medialane.report", "choices": [], "medialane": REPORT_FIELDS}]


async def test_other_stream_formats_end_with_a_dedicated_event_type():
    events = [
        b'event: message_start\ndata: {"type":"message_start"}\n\n',
        b'event: message_stop\ndata: {"type":"s"}\n\n',
    ]
    out = b"".join(await spliced(events, STREAM))
    assert out.startswith(b"".join(events))
    assert out[len(b"".join(events)) :].startswith(b"event: medialane.report\ndata: ")
    assert events_of(out)[-1] == {"type": "medialane.report", "medialane": REPORT_FIELDS}


async def answered(*pieces, status=200, headers=((b"content-type", b"application/json"),), length=True):
    sent = SentMessages()
    send = ReportSender(sent, lambda: REPORT)
    headers = list(headers)
    if length:
        headers.append((b"Content-Length", str(sum(map(len, pieces))).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for n, piece in enumerate(pieces):
        await send({"type": "http.response.body", "body": piece, "more_body": n < len(pieces) - 1})
    return sent


async def test_content_length_matches_the_sent_bytes():
    sent = await answered(json.dumps(ANSWER).encode())
    assert json.loads(sent.body)["medialane"] == REPORT_FIELDS
    assert sent.headers == {b"content-type": b"application/json", b"content-length": str(len(sent.body)).encode()}


async def test_errors_have_the_report():
    sent = await answered(b'{"error":{"message":"no"}}', status=422)
    assert json.loads(sent.body) == {"error": {"message": "no"}, "medialane": REPORT_FIELDS}


async def test_chunked_response_has_no_content_length():
    sent = await answered(*cut(json.dumps(ANSWER).encode(), 10))
    assert sent.headers == {b"content-type": b"application/json"}
    assert json.loads(sent.body)["medialane"] == REPORT_FIELDS


async def test_stream_begins_with_its_first_event():
    sent = SentMessages()
    send = ReportSender(sent, lambda: REPORT)
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": EVENTS[0], "more_body": True})
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent.body == EVENTS[0]
    assert sent.headers == dict(headers)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-type", b"text/plain")],
        [(b"content-type", b"application/json"), (b"content-encoding", b"gzip")],
        [],
    ],
)
async def test_other_responses_are_unchanged(headers):
    sent = await answered(b'{"error":{}}', b"", headers=headers)
    assert sent.body == b'{"error":{}}'
    assert sent.headers[b"Content-Length"] == b"12"


def client(answer, content_type):
    respond = httpx2.MockTransport(
        lambda _request: httpx2.Response(200, content=answer, headers={"content-type": content_type})
    )
    http = httpx2.Client(transport=respond)
    return openai.OpenAI(api_key="none", base_url="http://gateway.test/v1", http_client=http)


ASK = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


async def test_openai_client_reads_the_stream():
    answer = b"".join(await spliced(EVENTS, STREAM))
    with client(answer, "text/event-stream") as found:
        chunks = list(found.chat.completions.create(**ASK, stream=True))
    assert "".join(c.choices[0].delta.content for c in chunks if c.choices) == "adata: [DONE]"
    assert [c.model_extra.get("medialane") for c in chunks] == [None, None, None, REPORT_FIELDS]


async def test_openai_stream_helper_keeps_the_usage():
    answer = b"".join(await spliced(EVENTS, STREAM))
    with client(answer, "text/event-stream") as found, found.chat.completions.stream(**ASK) as stream:
        final = stream.get_final_completion()
    assert final.usage.total_tokens == 5
    assert final.system_fingerprint == "f"
    assert final.choices[0].message.content == "adata: [DONE]"


async def test_openai_client_reads_the_response():
    answer = b"".join(await spliced([json.dumps(ANSWER).encode()]))
    with client(answer, "application/json") as found:
        completion = found.chat.completions.create(**ASK)
    assert completion.usage.total_tokens == 3
    assert completion.model_extra["medialane"] == REPORT_FIELDS


async def test_openai_client_reads_a_responses_stream():
    event = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"hi"}\n\n'
    answer = b"".join(await spliced([event], STREAM))
    with client(answer, "text/event-stream") as found:
        # The client builds its types at the first call, which takes seconds.
        stream = await asyncio.to_thread(found.responses.create, model="m", input="x", stream=True)
        events = await asyncio.to_thread(list, stream)
    assert [e.type for e in events] == ["response.output_text.delta", "medialane.report"]
    assert events[1].model_extra["medialane"] == REPORT_FIELDS


NO_SIZE = MediaSize()
VIDEO = MediaSize(width=640, height=360, num_frames=3, metadata=b'{"fps":30.0,"frames_indices":[0,15,31],"x":[]}')


def item(ref, mm_hash, size=NO_SIZE, **more):
    return StagedItem(ref, Feature(ref.modality, mm_hash, b"", (), size), None, **more)


def test_report_of_several_prompts_is_about_one_with_media():
    text, media, other = (RoutingDecision("w0", "idle") for _ in range(3))
    shm = HandoverPath(STAGES["features"], ShmTransport(None))
    with open_scope() as scope:
        ref = MediaRef("image", "a", data=b"1")
        scope.record.received([ref], model="m", streams=False)
        scope.record.prepared([item(ref, "h")])
        for decision, path in ((text, None), (media, shm), (other, None)):
            scope.record.sending(decision, path)
        assert msgspec.json.decode(request_report(scope.record))["transport"] == "shm"
        scope.record.sending(media, HandoverPath(STAGES["url"], InlineTransport(None, 0)))
        assert msgspec.json.decode(request_report(scope.record))["stage"] == "url", "the last attempt"


def pages_of(scope, *outcomes):
    """The record of an image and a document, whose pages were found like this (None: not yet)."""
    numbers = range(1, len(outcomes) + 1)
    pages = [MediaRef("image", f"d.file#page={n}", data=b"12", media_type=PDF_TYPE, content="c") for n in numbers]
    scope.record.received([MediaRef("image", "a", data=b"1"), *pages], model="m", streams=False, num_documents=1)
    for page, is_hit in zip(pages, outcomes, strict=True):
        if is_hit is not None:
            with scope.record.finding(page) as timeline:
                timeline.add("fetch" if is_hit else "decode", 0.02)
            scope.record.prepared([item(page, "h", MediaSize(width=8, height=9), is_hit=is_hit)], [7])
    return scope.record


def test_report_sums_up_the_pages_of_a_document():
    with open_scope() as scope:
        report = msgspec.json.decode(request_report(pages_of(scope, True, False, None)))
    assert [(page["param"], page["modality"], page["cache"]) for page in report["items"]] == [
        ("d.file#page=1", "document", "hit"),
        ("d.file#page=2", "document", "miss"),
    ]
    (document,) = report["documents"]
    assert document.pop("ms") >= 0
    assert document == {"param": "d.file", "num_pages": 2, "num_hits": 1, "num_tokens": 14}


def test_operators_see_a_document_as_one_item():
    with open_scope() as scope:
        view = request_view(pages_of(scope, True, False, None))
    assert (view.num_items, len(view.items)) == (4, 2)
    document = view.items[1]
    assert (document.param, document.modality, document.outcome) == ("d.file", "document", "new")
    assert document.pages == {"hit": 1, "new": 1, "pending": 1}
    assert (document.bytes, document.tokens, document.width, view.items[0].pages) == (2, 14, None, None)
    assert document.stages_ms["decode"] == 20


def test_operators_see_a_document_that_is_kept():
    with open_scope() as scope:
        kept = MediaRef("image", "file", data=b"12", media_type=PDF_TYPE)
        scope.record.received([kept], model=None, streams=False)
        (found,) = request_view(scope.record).items
    assert (found.param, found.modality, found.bytes, found.pages) == ("file", "document", 2, None)


def test_scope_reports_items_in_request_order():
    refs = MediaRef("image", "a", data=b"1"), MediaRef("video", "b", data=b"2")
    with open_scope() as scope:
        scope.record.received(refs, model="m", streams=False)
        scope.record.prepared([item(refs[1], "h2", VIDEO, is_hit=False)], [9])
        scope.record.prepared([item(refs[0], "h1")])
        decision = RoutingDecision("w0", "idle")
        scope.record.sending(decision, HandoverPath(STAGES["features"], PullTransport(None)))
        first = OutputDelta("r", [], num_cached_tokens=7, movers=("nixl", "tcp"))
        scope.record.answered(first, decision, 20, {}, times=(1.0, 1.5))
        scope.timeline.add("decode", 0.0123456)
        scope.timeline.copied_bytes = 5
        found = msgspec.json.decode(request_report(scope.record))
    times_ms = found.pop("times_ms")
    assert (times_ms["first_token"], times_ms["decode"]) == (500.0, 12.35)
    assert list(times_ms) == ["upload", "decode", "prefill", "first_token", "answer"], "in order"
    routing = found.pop("routing")
    assert (routing["worker"], routing["reason"], routing["engine_cached_tokens"]) == ("w0", "idle", 7)
    assert found == {
        "items": [
            {"param": "a", "modality": "image", "cache": "none", "mm_hash": "h1"},
            {
                "param": "b",
                "modality": "video",
                "cache": "miss",
                "mm_hash": "h2",
                "width": 640,
                "height": 360,
                "num_frames": 3,
                "timestamps": [0.0, 0.5, 1.033],
                "num_tokens": 9,
            },
        ],
        "stage": "features",
        "transport": "pull",
        "movers": ["nixl", "tcp"],
        "copied_bytes": 5,
    }


@pytest.mark.parametrize("metadata", [b"", b"{}", b'{"fps":0,"frames_indices":[1]}', b'{"fps":null}', b'{"fps":2}'])
def test_video_without_times_has_no_timestamps(metadata):
    with open_scope() as scope:
        ref = MediaRef("video", "a", data=b"1")
        scope.record.received([ref], model="m", streams=False)
        scope.record.prepared([item(ref, "h", MediaSize(metadata=metadata))])
        (found,) = msgspec.json.decode(request_report(scope.record))["items"]
    assert "timestamps" not in found


def test_report_says_what_was_done_about_each_embedding():
    refs = [MediaRef("image", name, data=b"1") for name in "abc"]
    with open_scope() as scope:
        scope.record.received(refs, model="m", streams=False)
        scope.record.prepared([item(ref, f"h{ref.param}") for ref in refs])
        first, decision = OutputDelta("r", [], num_cached_tokens=0), RoutingDecision("w0", "idle")
        scope.record.answered(first, decision, 9, {"ha": "loaded", "hb": "encoded"}, times=(0.0, 0.0))
        found = msgspec.json.decode(request_report(scope.record))
    assert [each.get("embedding") for each in found["items"]] == ["loaded", "encoded", None]


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"embedded": ("h",), "loaded": ("h",)}, "loaded"),
        ({"embedded": ("h", "other"), "loaded": ("other",)}, "encoded"),
        ({"embedded": ("other",)}, "unkept"),
        ({}, "unkept"),
        ({"num_cached_tokens": 29}, "unkept"),
        ({"num_cached_tokens": 30, "embedded": ("h",), "loaded": ("h",)}, "unneeded"),
    ],
)
def test_first_output_says_what_was_done_about_an_embedding(fields, outcome):
    assert embedding_outcome(MediaSpan("h", 10, 20), OutputDelta("r", [], **fields)) == outcome


def test_documented_schema_is_that_of_the_report():
    """Write it anew with `report_schema()` when a member changes: names stay what they are."""
    assert (Path(__file__).parents[3] / "docs/report.schema.json").read_text() == report_schema()


def test_report_of_every_member_is_of_the_schema():
    refs = MediaRef("image", "a#page=1", data=b"1", media_type=PDF_TYPE), MediaRef("video", "b", data=b"2")
    decision = RoutingDecision(
        "w0", "idle", parts=CostParts(prefill=2.0), alternatives=(Alternative("w1", 0, 3.5, 16),)
    )
    with open_scope() as scope:
        scope.record.id = "mine-1"
        scope.record.received(refs, model="m", streams=False, num_documents=1)
        items = [item(refs[0], "h1", MediaSize(3, 4), is_hit=True), item(refs[1], "h2", VIDEO, is_hit=False)]
        scope.record.prepared(items, [4, 9])
        scope.record.sending(decision, HandoverPath(STAGES["features"], PullTransport(None)))
        scope.record.sent.movers = ("tcp",)
        scope.record.prefilled(OutputDelta("r", [], num_cached_tokens=16), decision, 0.02)
        scope.record.transferred(30)
        scope.timeline.add("decode", 0.01)
        scope.timeline.copied_bytes = 5
        found = msgspec.json.decode(request_report(scope.record))
    jsonschema.validate(found, json.loads(report_schema()))
    prefill = {"outcome": "split", "worker": "w0", "cached_tokens": 16, "transferred_tokens": 30, "ms": 20.0}
    assert found["prefill"] == prefill
    assert found.keys() == json.loads(report_schema())["$defs"]["Report"]["properties"].keys()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**found, "items": [{}]}, json.loads(report_schema()))
