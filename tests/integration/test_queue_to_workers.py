"""Requests wait in the gateway while the workers have as much as they can do: who is next, and who is refused."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import tempfile
from contextlib import AsyncExitStack

import msgspec
import pytest
from gateway_parts import FakeWorker, Parts, png, prompt, request

from fake_engine import FAKE_CARD
from medialane.gateway import GatewayConfig, current_scope, open_scope
from medialane.gateway.admission import Tenants
from medialane.gateway.intake import ExtractedMedia
from medialane.types.errors import MedialaneError, QueueTimeout, TtftLimitExceeded
from medialane.types.media import MediaRef
from waiting import eventually

ONE_AT_A_TIME = msgspec.structs.replace(FAKE_CARD, max_num_seqs=1)
NAMES = ("heavy", "light", "late")
FAST = {"reconnect_initial_s": 0.01, "reconnect_max_s": 0.05}


@pytest.fixture
async def open_parts(arena, preparers):
    """A gateway with one worker, whose engine runs one request at a time."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))

        async def start(card=ONE_AT_A_TIME, **config):
            worker = FakeWorker(f"{folder}/w.sock", arena=arena, card=card)
            stack.push_async_callback(worker.close)
            await worker.start()
            config = {"queue_requests": 100, **config}
            return await stack.enter_async_context(
                Parts(arena, preparers, [worker], config=GatewayConfig(**config, **FAST))
            )

        yield start
    gc.collect()


@pytest.fixture
def tenants(tmp_path):
    path = tmp_path / "keys"
    lines = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "priority": 5 * (name == "late")}
        for name in NAMES
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    path.chmod(0o600)
    tenants = Tenants(str(path))
    return {name: tenants.of(hashlib.sha256(name.encode()).digest()) for name in NAMES}


class Clients:
    """Requests, and the names of the answered ones, in that order."""

    def __init__(self, parts):
        self.parts = parts
        self.answered = []
        self.admission_s = {}

    async def text(self, name, tenant=None, num_tokens=100, **params):
        with open_scope() as scope:
            scope.tenant = tenant
            wanted = request(name, list(range(len(self.answered), len(self.answered) + num_tokens)), **params)
            await self.parts.generate(wanted, None)
            self._note(name)

    async def image(self, name, seed, tenant=None, **params):
        with open_scope() as scope:
            scope.tenant = tenant
            await self.parts.answer(prompt(png(seed=seed)), name, **params)
            self._note(name)

    def _note(self, name):
        self.answered.append(name)
        self.admission_s[name] = current_scope().timeline.durations().get("admission", 0.0)

    @property
    def num_waiting(self):
        return {name: queue.num_requests for name, queue in self.parts.gateway.queues.stats().items()}


async def begun(clients, num_waiting, *coroutines):
    """Start requests one after the other, until so many wait for an engine."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    await eventually(lambda: clients.num_waiting["engine"] == num_waiting)
    return tasks


async def test_requests_of_a_tenant_that_floods_wait_behind_those_of_another(open_parts, tenants):
    clients = Clients(await open_parts())
    tasks = [asyncio.create_task(clients.text("first", tenants["heavy"], token_s=0.05))]
    await eventually(lambda: clients.parts.workers[0].engine.num_requests == 1)
    tasks += await begun(clients, 10, *(clients.text("heavy", tenants["heavy"], token_s=0.005) for _ in range(10)))
    tasks += await begun(clients, 13, *(clients.text("light", tenants["light"], token_s=0.005) for _ in range(3)))
    await asyncio.gather(*tasks)
    assert clients.answered[0] == "first"
    assert clients.answered[1:8].count("light") == 3, "they take turns"
    assert clients.num_waiting == {"engine": 0, "preparer": 0}


async def test_wait_is_that_of_the_oldest_request_and_zero_again(open_parts):
    parts = await open_parts()
    clients = Clients(parts)
    assert parts.gateway.waits().expected_s == 0
    first = asyncio.create_task(clients.text("first", token_s=0.1))
    await eventually(lambda: parts.workers[0].engine.num_requests == 1)
    waiting = await begun(clients, 5, *(clients.text("next") for _ in range(5)))
    await eventually(lambda: parts.gateway.waits().expected_s > 0.02)
    assert 0.02 < parts.gateway.queues.stats()["engine"].oldest_s <= parts.gateway.waits().expected_s
    await asyncio.gather(first, *waiting)
    assert parts.gateway.waits().expected_s == 0


async def test_less_urgent_tenants_wait(open_parts, tenants):
    clients = Clients(await open_parts())
    tasks = [asyncio.create_task(clients.text("first", token_s=0.05))]
    await eventually(lambda: clients.parts.workers[0].engine.num_requests == 1)
    tasks += await begun(clients, 3, *(clients.text("late", tenants["late"]) for _ in range(3)))
    tasks += await begun(clients, 6, *(clients.text("heavy", tenants["heavy"]) for _ in range(3)))
    await asyncio.gather(*tasks)
    assert clients.answered == ["first", *["heavy"] * 3, *["late"] * 3]


async def test_text_does_not_wait_behind_media_of_the_same_clients(open_parts):
    clients = Clients(await open_parts())
    tasks = [asyncio.create_task(clients.text("first", token_s=0.2))]
    await eventually(lambda: clients.parts.workers[0].engine.num_requests == 1)
    tasks += [asyncio.create_task(clients.image("image", seed)) for seed in range(6)]
    await eventually(lambda: clients.num_waiting["engine"] + clients.num_waiting["preparer"] == 6)
    tasks += [asyncio.create_task(clients.text("text", num_tokens=10)) for _ in range(4)]
    await asyncio.gather(*tasks)
    assert clients.answered[1:9].count("text") == 4
    await eventually(lambda: clients.parts.num_held == 0)


async def test_media_that_are_not_cached_wait_for_preparers_and_are_prepared_once(open_parts):
    clients = Clients(await open_parts(card=FAKE_CARD))
    with open_scope():
        expected = [await clients.parts.answer(prompt(png(seed=seed)), f"{seed}") for seed in range(3)]

    async def answer(seed):
        with open_scope():
            return await clients.parts.answer(prompt(png(seed=seed)), f"{seed}")

    tasks = [asyncio.create_task(answer(seed)) for seed in (*range(10, 40), *range(3))]
    await eventually(lambda: clients.num_waiting["preparer"] > 0)
    assert (await asyncio.gather(*tasks))[-3:] == expected
    assert clients.num_waiting == {"engine": 0, "preparer": 0}
    await eventually(lambda: clients.parts.num_held == 0)


async def test_request_that_waits_too_long_is_refused_with_the_time_to_come_back(open_parts, tenants):
    parts = await open_parts(queue_timeout_s=0.1)
    clients = Clients(parts)
    first = asyncio.create_task(clients.text("first", token_s=0.4))
    await eventually(lambda: parts.workers[0].engine.num_requests == 1)
    with open_scope() as scope:
        scope.tenant = tenants["light"]
        with pytest.raises(QueueTimeout):
            await parts.generate(request("late", [1, 2, 3]), None)
        assert scope.failure.error.code == "queue_timeout"
        assert scope.failure.error.retry_after_s >= 1
    assert parts.count("medialane_refused_requests_total", tenant="light", reason="queue_timeout") == 1
    await first
    assert parts.workers[0].engine.num_requests == 1, "it was not sent"
    await clients.text("next")


async def test_request_is_refused_by_its_header_if_those_that_wait_take_longer_than_its_limit(open_parts, tenants):
    parts = await open_parts(ttft_limit_s=1.0)
    queues = parts.gateway.queues

    async def arrived(number):
        with open_scope() as scope:
            queues.arrive(scope, num_bytes=1000)
            queues.received(scope)
            await parts.generate(request(f"r{number}", [1, 2, 3], token_s=0.02, max_tokens=4), None)

    tasks = [asyncio.create_task(arrived(number)) for number in range(30)]
    await eventually(lambda: parts.workers[0].engine.num_requests == 8)
    with open_scope() as scope, pytest.raises(TtftLimitExceeded) as refused:
        queues.arrive(scope, num_bytes=1000)
    assert refused.value.retry_after_s >= 1
    assert parts.count("medialane_refused_requests_total", tenant="", reason="ttft_limit_exceeded") == 1
    with open_scope() as scope:
        scope.ttft_limit_ms = 60_000.0
        queues.arrive(scope, num_bytes=1000)
    with open_scope() as scope:
        queues.arrive(scope, num_bytes=1 << 20)  # media, of which none wait
    with open_scope() as scope:
        scope.tenant = tenants["light"]
        queues.arrive(scope, num_bytes=1000)
    for each in await asyncio.gather(*tasks, return_exceptions=True):
        assert each is None or isinstance(each, QueueTimeout)
    with open_scope() as scope:
        queues.arrive(scope, num_bytes=1000)


async def test_request_with_a_small_body_is_among_those_with_media_once_it_is_known_to_have_some(open_parts):
    queues = (await open_parts()).gateway.queues
    with open_scope() as scope:
        queues.arrive(scope, num_bytes=100)
        text = scope.flow
        scope.extracted = ExtractedMedia((MediaRef("image", "messages[0].content[0]", url="http://host/a.png"),))
        queues.received(scope)
        assert (text.is_media, text.num_in_flight) == (False, 0)
        assert (scope.flow.is_media, scope.flow.num_in_flight) == (True, 1)
        media = scope.flow
    assert media.num_in_flight == 0


async def test_cancelled_request_leaves_the_queue(open_parts):
    parts = await open_parts()
    clients = Clients(parts)
    first = asyncio.create_task(clients.text("first", token_s=0.05))
    await eventually(lambda: parts.workers[0].engine.num_requests == 1)
    (waiting,) = await begun(clients, 1, clients.text("cancelled"))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert clients.num_waiting["engine"] == 0
    await first
    await clients.text("next")
    assert parts.workers[0].engine.num_requests == 2


async def test_prepared_media_are_not_refused(open_parts):
    """They have been decoded: that work would be lost."""
    parts = await open_parts(queue_timeout_s=0.15)
    clients = Clients(parts)
    first = asyncio.create_task(clients.text("first", token_s=0.5))
    await eventually(lambda: parts.workers[0].engine.num_requests == 1)
    await asyncio.gather(clients.image("image", 1), first)
    assert sorted(clients.answered) == ["first", "image"], "sent without room once they have waited long enough"
    assert clients.admission_s["image"] >= 0.15


async def test_nothing_waits_without_a_queue(open_parts):
    parts = await open_parts(queue_requests=0)
    assert parts.gateway.queues is None
    clients = Clients(parts)
    tasks = [asyncio.create_task(clients.text("a", token_s=0.02)) for _ in range(5)]
    await eventually(lambda: parts.workers[0].engine.num_requests == 5)
    await asyncio.gather(*tasks)


async def test_request_fails_at_once_if_no_worker_is_ready(open_parts):
    parts = await open_parts()
    await parts.workers[0].close()
    await eventually(lambda: not parts.links.num_ready)
    with open_scope(), pytest.raises(MedialaneError) as refused:
        await parts.generate(request("r", [1, 2, 3]), None)
    assert refused.value.code == "no_worker_ready"
