"""A few texts at a time are rendered, and each is sent as soon as it is: every way out of that frees the place."""

import asyncio
import json

import pytest
from prometheus_client import CollectorRegistry

from intakes import Intake
from medialane.gateway import GatewayConfig, ScopeMiddleware, current_scope
from medialane.gateway.admission import Queues
from medialane.observability import Metrics
from medialane.routing import Router
from waiting import eventually

TEXT = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
IMAGE = {"type": "image_url", "image_url": {"url": "http://host/a.png"}}
WITH_IMAGE = json.dumps({"messages": [{"role": "user", "content": [IMAGE]}]}).encode()


class Site:
    """Middlewares in front of an app whose requests go on when the test calls `proceed`, with a way out."""

    def __init__(self, **config):
        metrics, self.config = Metrics(CollectorRegistry()), GatewayConfig(**config)
        self.queues = Queues(self.config, Router(), metrics)
        self._intake = Intake(self._app, self.config, queues=self.queues)
        self._clients = ScopeMiddleware(self._served, metrics)
        self.rendering, self.timelines = [], {}
        self._proceed, self._leaves = {}, {}

    async def _served(self, scope, receive, send):
        current_scope().passes_by = False
        await self._intake(scope, receive, send)

    async def _app(self, scope, receive, send):
        name, request = scope["path"], current_scope()
        self.timelines[name] = request.timeline
        self.rendering.append(name)
        self._proceed[name] = asyncio.get_running_loop().create_future()
        way_out = await self._proceed[name]
        if way_out == "sent":
            self.queues.sent(request)
        if way_out == "waits for room":
            await self.queues.engine(request, 10, has_media=False)
        if way_out in ("sent", "disconnected"):
            await asyncio.Event().wait()
        if way_out == "raises":
            raise RuntimeError("the app's own error")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def ask(self, name, body=TEXT):
        leaves = self._leaves[name] = asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if not messages:
                await leaves.wait()
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(_message):
            pass

        scope = {"type": "http", "method": "POST", "path": name, "headers": [(b"content-type", b"application/json")]}
        return asyncio.create_task(self._clients(scope, receive, send))

    def proceed(self, name, way_out):
        if way_out == "disconnected":
            self._leaves[name].set()
        self._proceed[name].set_result(way_out)

    def close(self):
        self._intake.close()


@pytest.fixture
def site():
    made = Site()
    yield made
    made.close()


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)  # time: more steps than a request takes to the app


async def ended(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@pytest.mark.parametrize("way_out", ["sent", "waits for room", "ends", "disconnected", "raises"])
async def test_fourth_text_is_rendered_once_one_of_three_is_on_its_way(site, way_out):
    tasks = [site.ask(name) for name in "abcd"]
    await settled()
    assert site.rendering == ["a", "b", "c"]
    site.proceed("b", way_out)
    await eventually(lambda: "d" in site.rendering)
    tasks.append(site.ask("e"))
    await settled()
    assert "e" not in site.rendering, "one place was freed, once"
    assert "admission" in site.timelines["d"].seconds
    assert "admission" not in site.timelines["a"].seconds, "none waited before it"
    if way_out == "raises":
        with pytest.raises(RuntimeError):
            await tasks[1]
    await ended(tasks)


async def test_request_that_is_cancelled_while_it_waits_leaves_its_turn_to_the_next(site):
    tasks = [site.ask(name) for name in "abcde"]
    await settled()
    await ended([tasks[3]])
    site.proceed("a", "ends")
    await eventually(lambda: "e" in site.rendering)
    assert "d" not in site.rendering
    await ended(tasks)


async def test_media_take_no_turn_and_wait_for_none(site):
    tasks = [site.ask(f"image {number}", WITH_IMAGE) for number in range(4)]
    tasks += [site.ask(name) for name in "abcd"]
    await settled()
    assert len(site.rendering) == 7
    tasks.append(site.ask("image 4", WITH_IMAGE))
    await settled()
    assert "image 4" in site.rendering
    assert "d" not in site.rendering
    await ended(tasks)


async def test_texts_that_wait_for_something_else_delay_others_by_half_a_second(site):
    tasks = [site.ask(name) for name in "abcd"]
    await eventually(lambda: "d" in site.rendering)
    assert site.timelines["d"].seconds["admission"] < 3
    await ended(tasks)
