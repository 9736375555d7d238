"""The whole check over two fake servers: what it learns, sends and finds."""

import json
from contextlib import asynccontextmanager
from functools import partial

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from medialane.tools.check import CaseRequest, CheckClient, CheckProgress, CheckSetup, run
from medialane.tools.check.media import without_documents
from medialane.tools.check.servers import OUR_LOG, RevivedServer
from medialane.types.errors import StartupFailed

CHAT = "/v1/chat/completions"
LIMITS = {"image": 3, "audio": 0}
METRICS = """\
# TYPE medialane_worker_keeps_embeddings gauge
medialane_worker_keeps_embeddings{worker="0",reason=""} 1.0
medialane_worker_keeps_embeddings{worker="1",reason="media: no such field"} 0.0
# TYPE medialane_headers_predicted gauge
medialane_headers_predicted{modality="image"} 1.0
medialane_headers_predicted{modality="audio"} 0.0
"""
LOGGED = "[gateway] 2026-11-21 03:54:54 WARNING medialane.cli.gateway: stage decoded, not features: too odd"


class FakeServer:
    """Answers every chat with its media; a subclass may be wrong about some."""

    def __init__(self, route=CHAT, *, has_docs=True):
        self.bodies = []
        self.app = web.Application(client_max_size=1 << 28)
        self.app.router.add_get("/v1/models", self.models)
        self.app.router.add_get("/health", self.health)
        self.app.router.add_get("/metrics", self.metrics)
        if has_docs:
            self.app.router.add_get("/openapi.json", self.routes)
        self.app.router.add_post(CHAT, self.chat)
        self._route = route

    async def health(self, _request):
        return web.Response()

    async def metrics(self, _request):
        return web.Response(text=METRICS)

    async def models(self, _request):
        return web.json_response({"data": [{"id": "served-name"}]})

    async def routes(self, _request):
        return web.json_response({"paths": {self._route: {}}})

    async def chat(self, request):
        body = dict(without_documents(CaseRequest(CHAT, await request.json())).body)
        self.bodies.append(body)
        media = [part for message in body["messages"] for part in message["content"] if isinstance(part, dict)]
        kinds = [part["type"].removesuffix("_url").removeprefix("input_") for part in media]
        for kind in set(kinds) - {"text"}:
            limit = LIMITS.get(kind, 0)
            if kinds.count(kind) > limit:
                message = f"At most {limit} {kind}(s) may be provided in one prompt."
                return web.json_response({"error": {"message": message}}, status=400)
        return await self.answer(request, body, hash(json.dumps(body["messages"])) % 1000)

    async def answer(self, request, body, token):
        report = {"medialane": {"stage": "features", "transport": "shm", "items": []}} if "medialane" in body else {}
        choice = {"index": 0, "token_ids": [token]}
        if not body.get("stream"):
            return web.json_response({"choices": [choice], **report})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in ({"choices": [choice]}, {"choices": [], **report}):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


class OneKindOnly(FakeServer):
    """Refuses text beside media."""

    async def answer(self, request, body, token):
        if len({part["type"] for part in body["messages"][-1]["content"] if isinstance(part, dict)}) > 1:
            return web.json_response({"error": {"message": "text or media"}}, status=400)
        return await super().answer(request, body, token)


class WrongAboutTwo(FakeServer):
    async def answer(self, request, body, token):
        contents = [part["type"] for part in body["messages"][-1]["content"] if isinstance(part, dict)]
        return await super().answer(request, body, token + (contents.count("image_url") == 2))


class Closing(FakeServer):
    async def answer(self, request, body, token):
        if body.get("n") == 2:
            request.transport.close()
        return await super().answer(request, body, token)


@pytest.fixture
def check(monkeypatch, tmp_path):
    (tmp_path / OUR_LOG).write_text(f"worker 0: ready\n{LOGGED}\n{LOGGED}\n")

    async def check(plain, ours, **options):
        served = []

        def opened(fake, *, wants_report):
            start = partial(started, fake, wants_report=wants_report)
            return RevivedServer("a server", start, CheckProgress(Console(quiet=True)))

        @asynccontextmanager
        async def started(fake, _number, *, wants_report):
            served.append(fake)
            async with (
                TestServer(fake.app) as server,
                CheckClient.opened(str(server.make_url("")).rstrip("/"), wants_report=wants_report) as client,
            ):
                yield client

        @asynccontextmanager
        async def both(_setup, _progress):
            async with opened(plain, wants_report=False) as one, opened(ours, wants_report=True) as other:
                yield one, other

        servers = run.CheckedServers(
            plain=lambda _setup, _progress: opened(plain, wants_report=False),
            ours=lambda _setup, _progress: opened(ours, wants_report=True),
            both=both,
        )
        setup = CheckSetup(model="m", vllm_args=(), environ={}, own_environ={}, logs=tmp_path, **options)
        return await run.run_check(setup, CheckProgress(Console(quiet=True)), servers)

    return check


@pytest.mark.parametrize("at_once", [False, True])
async def test_equal_servers_pass_and_the_limits_are_learned(check, at_once):
    plain, ours = FakeServer(), FakeServer()
    report = await check(plain, ours, at_once=at_once, essential=True)
    assert report.passed
    assert report.limits == {"image": 3}
    assert report.kinds == ("chat",)
    assert {result.verdict for result in report.results} == {"equal", "refused"}
    assert "features (shm)" in report.stages
    assert {body["model"] for body in plain.bodies + ours.bodies} == {"served-name"}
    sent = [{**body, "medialane": None} for body in ours.bodies]
    assert sent == [{**body, "medialane": None} for body in plain.bodies[-len(sent) :]]


async def test_modality_that_is_accepted_without_text_only_is_learned(check):
    report = await check(OneKindOnly(), OneKindOnly(), only=["one image", "image alone"])
    assert report.limits == {"image": 3}
    assert [result.verdict for result in report.results] == ["refused", "equal"]


async def test_notes_name_missing_modalities_and_what_medialane_logged(check):
    report = await check(FakeServer(), FakeServer(), only=["text"])
    notes = "\n".join(report.notes)
    assert "no video: plain vLLM answers 400: At most 0 video(s)" in notes
    assert notes.count("stage decoded, not features: too odd") == 1
    assert report.no_embeddings == "media: no such field"
    assert report.predicted == ("image",)


async def test_wrong_answers_fail_exactly_their_cases(check):
    report = await check(FakeServer(), WrongAboutTwo(), only=["image"])
    assert not report.passed
    wrong = {result.case for result in report.results if result.verdict == "differs"}
    assert {"two of image", "the same image twice"} <= wrong
    assert not {"one image", "image in two turns", "three of image"} & wrong


async def test_medialane_without_an_answer_differs(check):
    report = await check(FakeServer(), Closing(), only=["n=2"])
    assert {result.verdict for result in report.results} == {"differs"}
    assert all("no response" in result.detail for result in report.results)


async def test_medialane_may_answer_what_plain_vllm_does_not(check):
    report = await check(Closing(), FakeServer(), only=["n=2", "tall"])
    assert report.passed
    assert [result.verdict for result in report.results] == ["equal", "answered", "answered"]


async def test_nothing_to_send_is_an_error(check):
    with pytest.raises(StartupFailed, match="--only matches none"):
        await check(FakeServer(), FakeServer(), only=["no such case"])
    with pytest.raises(StartupFailed, match="no route of"):
        await check(FakeServer(route="/v1/other"), FakeServer())


async def test_a_server_that_refuses_its_routes_is_reported(check):
    with pytest.raises(StartupFailed, match=r"openapi\.json gave no answer.*404"):
        await check(FakeServer(has_docs=False), FakeServer())


async def test_only_selects_by_words(check):
    plain = FakeServer()
    report = await check(plain, FakeServer(), only=["tall", "n=2"])
    assert [result.case for result in report.results] == [
        "image, tall (60x660)",
        "n=2, greedy",
        "n=2, sampled with a seed",
    ]
