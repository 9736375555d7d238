"""A request that cannot be served in time is refused when its header is there: nothing of its body is read."""

import json

import pytest
from prometheus_client import CollectorRegistry

from intakes import Intake
from medialane.gateway import GatewayConfig, ScopeMiddleware, current_scope
from medialane.gateway.admission import Queues
from medialane.observability import Metrics
from medialane.routing import Router

SMALL = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
LARGE_BYTES = 200_000
IMAGE = {"type": "image_url", "image_url": {"url": "http://host/a.png"}}
WITH_URL = json.dumps({"messages": [{"role": "user", "content": [IMAGE]}]}).encode()


class Gateway:
    """Middlewares in front of an app that notes the flow of each request, and of which an engine gets a request each
    second. `passes_by`: requests are administrative."""

    def __init__(self, clock, *, passes_by=False, has_priorities=False, **config):
        self.clock = clock
        self.metrics = Metrics(CollectorRegistry())
        self.config = GatewayConfig(**config)
        self.queues = Queues(self.config, Router(), self.metrics, has_priorities=has_priorities, clock=clock)
        self.flows = []
        self.passes_by = passes_by
        self._intake = Intake(self._app, self.config, queues=self.queues)

        async def clients(scope, receive, send):
            current_scope().passes_by = self.passes_by
            await self._intake(scope, receive, send)

        self._stack = ScopeMiddleware(clients, self.metrics)

    async def _app(self, _scope, receive, send):
        await receive()
        self.flows.append(current_scope().flow)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(self, body=SMALL, *, declared=None, headers=()):
        """Return the status, the code and the headers of the answer, and whether any of the body was read."""
        is_read, sent = False, []

        async def receive():
            nonlocal is_read
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            sent.append(message)

        length = str(declared or len(body)).encode()
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
        scope["headers"] = [(b"content-type", b"application/json"), (b"content-length", length), *headers]
        await self._stack(scope, receive, send)
        code = json.loads(sent[1]["body"])["error"]["code"] if sent[0]["status"] != 200 else ""
        return sent[0]["status"], code, dict(sent[0]["headers"]), is_read

    async def queue(self, *, is_media, number):
        """Have so many requests wait; the engine begins one of them each second."""
        body = WITH_URL if is_media else SMALL
        assert (await self.ask(body))[0] == 200
        flow = self.flows[-1]
        waiting = [object() for _ in range(number + 6)]
        for each in waiting:
            assert flow.accept(each, self.clock(), 1e9) is None
            flow.arrived(each)
            flow.lanes["engine"].add(each, self.clock())
        for each in waiting[:6]:
            self.clock.now += 1.0
            flow.lanes["engine"].leave(each, self.clock(), is_served=True)
            flow.sent(each, self.clock())

    def close(self):
        self._intake.close()


@pytest.fixture
def gateway(clock):
    gateways = []

    def make(**settings):
        gateways.append(Gateway(clock, **settings))
        return gateways[-1]

    yield make
    for each in gateways:
        each.close()


async def test_large_body_is_not_read_if_those_with_media_wait_too_long(gateway):
    site = gateway(queue_timeout_s=10.0)
    await site.queue(is_media=True, number=20)
    status, code, headers, is_read = await site.ask(declared=LARGE_BYTES)
    assert (status, code, is_read) == (503, "queue_full", False)
    assert 9 <= int(headers[b"retry-after"]) <= 11, "when few enough wait"
    assert (await site.ask())[0] == 200, "text does not wait behind media"


async def test_small_body_is_refused_once_it_is_known_to_have_media(gateway):
    site = gateway(queue_timeout_s=10.0)
    await site.queue(is_media=True, number=20)
    assert (await site.ask(WITH_URL))[:2] == (503, "queue_full")


async def test_text_is_refused_by_its_header_if_text_waits(gateway):
    site = gateway(queue_timeout_s=10.0)
    await site.queue(is_media=False, number=20)
    status, _, _, is_read = await site.ask()
    assert (status, is_read) == (503, False)
    assert (await site.ask(declared=LARGE_BYTES))[3], "it may have media, of which none wait"


async def test_limit_of_the_time_to_first_token_is_that_of_the_header(gateway):
    site = gateway(ttft_limit_s=60.0, trust_headers=True)
    await site.queue(is_media=False, number=20)
    assert (await site.ask())[0] == 200
    status, code, _, is_read = await site.ask(headers=[(b"x-llm-d-slo-ttft-ms", b"5000")])
    assert (status, code, is_read) == (503, "ttft_limit_exceeded", False)


async def test_administrative_requests_pass_by(gateway):
    site = gateway(queue_timeout_s=10.0)
    await site.queue(is_media=False, number=20)
    site.passes_by = True
    assert (await site.ask())[0] == 200
    assert site.flows[-1] is None


async def test_more_urgent_requests_are_judged_apart_by_their_bodies(gateway):
    site = gateway(queue_timeout_s=10.0, has_priorities=True)
    await site.queue(is_media=False, number=20)
    assert (await site.ask())[:2] == (503, "queue_full")
    urgent = json.dumps({"messages": [{"role": "user", "content": "hello"}], "priority": -1}).encode()
    assert (await site.ask(urgent))[0] == 200


async def test_nothing_is_left_of_requests_that_have_ended(gateway):
    site = gateway()
    for body in (SMALL, WITH_URL):
        await site.ask(body)
    assert [flow.num_in_flight for flow in site.flows] == [0, 0]
