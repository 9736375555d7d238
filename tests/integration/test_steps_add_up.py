"""Every millisecond of a request has a name: the steps that do not overlap add up to the whole, for text, new and
repeated images, streamed or not, in the header, the report and the metrics; each is where its time was spent."""

import asyncio
import base64
import json
import re

import pytest
from gateway_parts import Parts, png, request

from intakes import Intake
from medialane.gateway import ScopeMiddleware, current_scope
from medialane.observability import INNER_STEPS
from medialane.testing.fake_processor import PLACEHOLDER_TOKEN
from medialane.types.feature import MediaPrompt

#: What the app of the tests spends in each of its steps, and the engine for each token but the first: more than noise.
PAUSE_S = 0.03
LEAST_MS = 0.95 * PAUSE_S * 1000

ALWAYS = {"upload", "intake", "parse", "render", "route", "handover", "transit", "queue", "prefill", "first_token"}
ALWAYS |= {"answer", "response"}


class Client:
    """Asks a gateway whose app does what vLLM's does, with pauses. The whole stack is ours, from the header on."""

    def __init__(self, parts):
        self.parts = parts
        self.intake = Intake(self._app, queues=parts.gateway.queues)
        self._stack = ScopeMiddleware(self._served, parts.metrics)

    async def _served(self, scope, receive, send):
        current_scope().passes_by = False
        await self.intake(scope, receive, send)

    async def _app(self, scope, receive, send):
        body = json.loads((await receive())["body"])
        await pause()
        gateway, refs, prepared = self.parts.gateway, current_scope().extracted.refs, None
        with gateway.rendering():
            await pause()
            if refs:
                prepared = await gateway.prepare(MediaPrompt([1, 2, PLACEHOLDER_TOKEN], refs))
        token_ids = [1, 2, 3] if prepared is None else prepared.token_ids
        wanted = request("r", token_ids, max_tokens=2, token_s=PAUSE_S, streams=body["stream"])
        kind = b"text/event-stream" if body["stream"] else b"application/json"
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
        if body["stream"]:
            await send(start)
        await self.parts.generate(wanted, prepared)
        await pause()
        if not body["stream"]:
            await send(start)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n" if body["stream"] else b"{}"})

    async def ask(self, *images, stream=False):
        """Return the steps in the header and in the report, in ms."""
        urls = ["data:image/png;base64," + base64.b64encode(image).decode() for image in images]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = json.dumps({"messages": [{"role": "user", "content": content or "text"}], "stream": stream}).encode()
        messages, sent = [{"type": "http.request", "body": body, "more_body": False}], []

        async def receive():
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"x-medialane-report", b"true")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        await self._stack(scope, receive, send)
        timing = dict(sent[0]["headers"])[b"server-timing"].decode()
        header = {name: float(ms) for name, ms in re.findall(r"(\w+);dur=([\d.]+)", timing)}
        answer = b"".join(message.get("body", b"") for message in sent).removeprefix(b"data: ").split(b"\n")
        splices = [line.removeprefix(b"data: ") for line in answer if b"medialane" in line]
        return header, json.loads(splices[0])["medialane"]["times_ms"]


async def pause():
    await asyncio.sleep(PAUSE_S)  # time: what a step takes


@pytest.fixture
async def client(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        client = Client(parts)
        yield client
        client.intake.close()


def in_sequence(times_ms):
    return sum(ms for name, ms in times_ms.items() if name not in INNER_STEPS and name != "total")


async def test_steps_of_text_add_up(client):
    header, report = await client.ask()
    assert set(report) == ALWAYS
    assert in_sequence(header) == pytest.approx(header["total"], rel=0.03)
    for name in ("parse", "render", "answer", "response"):
        assert header[name] >= LEAST_MS, name
    assert in_sequence({name: report[name] for name in ("transit", "queue", "prefill")}) <= report["first_token"] + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_steps_of_a_new_and_a_repeated_image_add_up(client, stream):
    header, report = await client.ask(png(), stream=stream)
    assert set(report) == ALWAYS | {"store", "fetch", "decode", "process", "assemble"}
    assert report["decode"] + report["process"] <= report["store"] + 1
    assert in_sequence(header) == pytest.approx(header["total"], rel=0.03)
    _, again = await client.ask(png(), stream=stream)
    assert set(again) == ALWAYS | {"store", "fetch", "assemble"}
    for name in ("parse", "render", "answer", "response"):
        assert again[name] >= LEAST_MS, name


async def test_steps_in_the_metrics_add_up_to_the_requests(client):
    for images in ((), (png(),), (png(),)):
        await client.ask(*images, stream=True)
    count = client.parts.count
    named = count("medialane_stage_seconds_sum") - sum(
        count("medialane_stage_seconds_sum", stage=name) for name in INNER_STEPS
    )
    assert named == pytest.approx(count("medialane_request_seconds_sum"), rel=0.03)
    assert count("medialane_stage_seconds_count", stage="response") == 3


async def test_answer_of_several_prompts_ends_with_the_last_one(client):
    found = []

    async def app(_scope, _receive, _send):
        record = current_scope().record
        record.received([], model="m", streams=True)
        prompts = [request(f"r{n}", [n], max_tokens=1 + 20 * n, token_s=PAUSE_S) for n in range(2)]
        short, long = (asyncio.create_task(client.parts.generate(each, None)) for each in prompts)
        await short
        found.append(record.step)
        await long
        found.append(record.step)

    async def nothing(_message):
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await ScopeMiddleware(app, client.parts.metrics)(scope, nothing, nothing)
    assert found == ["answer", "response"]
