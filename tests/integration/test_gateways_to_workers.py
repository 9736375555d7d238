"""Two gateways over the same workers: each counts what the other has sent, before the engines report anything."""

from __future__ import annotations

import asyncio
import gc
import tempfile
from contextlib import AsyncExitStack

import msgspec
import pytest
from gateway_parts import FakeWorker, Parts, png, prompt, request

from fake_engine import FAKE_CARD
from medialane.gateway import GatewayConfig, open_scope
from medialane.types.request import WorkerLoad
from waiting import eventually

CARD = msgspec.structs.replace(FAKE_CARD, encoder_cache_tokens=100_000)
FAST = {"reconnect_initial_s": 0.01, "reconnect_max_s": 0.05}
#: Seconds before the first token.
LONG_S = 0.5


class Host:
    """Gateways, and workers whose engines report neither KV events nor load."""

    def __init__(self, gateways, workers):
        self.gateways, self.workers = gateways, workers

    def slots(self, number):
        return list(self.gateways[number].router._slots)  # what a choice reads; it has no other door

    def num_queued(self, number):
        return sum(slot.num_queued for slot in self.slots(number))

    async def start(self, number, wanted, prepared=None):
        """Send a request by a gateway, at which it stays without a token; return its task and the worker's address."""
        gateway, records = self.gateways[number], []

        async def answer():
            with open_scope() as scope:
                records.append(scope.record)
                return await gateway.generate(wanted, prepared)

        task = asyncio.create_task(answer())
        await eventually(lambda: records and records[0].attempts)
        return task, records[0].attempts[0].worker


def text(seed, token_s=LONG_S):
    return request(f"text-{seed}", list(range(1000 * seed, 1000 * seed + 640)), max_tokens=1, token_s=token_s)


@pytest.fixture(params=["features", "url"])
def stage(request):
    return request.param


async def open_host(stack, arena, preparers, **config):
    folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
    workers = [FakeWorker(f"{folder}/{number}.sock", arena=arena, card=CARD) for number in range(3)]
    for worker in workers:
        stack.push_async_callback(worker.close)
        await worker.start()
        worker.engine.listener = None
        worker.engine.loads = lambda: [WorkerLoad()]
    settings = GatewayConfig(**config, **FAST)
    first = await stack.enter_async_context(Parts(arena, preparers, workers, config=settings))
    second = await stack.enter_async_context(Parts(arena, preparers, workers, config=settings, beside=first))
    clients = [link.client for parts in (first, second) for link in parts.links.links.values()]
    await eventually(lambda: all(client.reports.num_gateways == 2 for client in clients))
    return Host([first, second], workers)


@pytest.fixture
async def host(arena, preparers):
    async with AsyncExitStack() as stack:
        yield await open_host(stack, arena, preparers)
    gc.collect()


async def test_second_gateway_sends_a_prompt_to_the_worker_that_the_first_has_sent_it_to(host):
    sent = [await host.start(0, text(seed)) for seed in range(3)]
    assert len({address for _, address in sent}) == 3
    await eventually(lambda: host.num_queued(1) == 3)
    again = [await host.start(1, text(seed)) for seed in reversed(range(3))]
    assert [address for _, address in again] == [address for _, address in reversed(sent)]
    await asyncio.gather(*[task for task, _ in sent + again])


async def test_second_gateway_sends_an_image_to_the_worker_that_is_about_to_encode_it(arena, preparers, stage):
    async with AsyncExitStack() as stack:
        host = await open_host(stack, arena, preparers, stage=stage)
        sent = []
        with open_scope():
            for seed in range(3):
                prepared = await host.gateways[0].gateway.prepare(prompt(png(300, 200, seed)))
                wanted = request(f"image-{seed}", prepared.token_ids, max_tokens=1, token_s=LONG_S)
                sent.append(await host.start(0, wanted, prepared))
            await eventually(lambda: host.num_queued(1) == 3)
            for seed in reversed(range(3)):
                # After another first token, so that no KV block is shared: the encoder cache alone decides.
                media = msgspec.structs.replace(
                    found := prompt(png(300, 200, seed)), token_ids=[9, *found.token_ids[1:]]
                )
                prepared = await host.gateways[1].gateway.prepare(media)
                wanted = request(f"again-{seed}", prepared.token_ids, max_tokens=1, token_s=LONG_S)
                sent.append(await host.start(1, wanted, prepared))
            await asyncio.gather(*[task for task, _ in sent])
        addresses = [address for _, address in sent]
        assert addresses[3:] == addresses[2::-1]
        assert len(set(addresses)) == 3
    gc.collect()


async def test_second_gateway_avoids_the_queues_that_the_first_has_filled(host):
    sent = [await host.start(0, text(seed)) for seed in range(2)]
    await eventually(lambda: host.num_queued(1) == 2)
    other = await host.start(1, text(7))
    assert other[1] not in {address for _, address in sent}
    await asyncio.gather(*[task for task, _ in [*sent, other]])


async def test_nothing_is_counted_for_the_other_gateway_after_the_first_token_or_an_abort(host):
    answered, aborted = [(await host.start(0, text(seed, token_s=0.2)))[0] for seed in range(2)]
    await eventually(lambda: host.num_queued(1) == 2)
    aborted.cancel()
    await eventually(lambda: host.num_queued(1) == 1)
    await answered
    await eventually(lambda: host.num_queued(1) == 0)
    assert [(slot.num_in_flight, slot.num_announced, slot.queued_ms) for slot in host.slots(1)] == [(0, 0, 0.0)] * 3


async def test_lost_worker_and_lost_gateway_end_what_was_announced(host):
    tasks = [(await host.start(0, text(seed)))[0] for seed in range(3)]
    await eventually(lambda: host.num_queued(1) == 3)
    links = host.gateways[0].links.links.values()
    for link in links:
        await link.client.close()
    await eventually(lambda: host.num_queued(1) == 0)
    await asyncio.gather(*tasks, return_exceptions=True)
    await eventually(lambda: all(link.client is not None and link.client.reports.num_gateways == 2 for link in links))
    task, _ = await host.start(1, text(9))
    await eventually(lambda: host.num_queued(0) == 1)
    for worker in host.workers:
        worker.drop_connections()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: host.gateways[0].links.num_ready == 3 and host.num_queued(0) == 0)


async def test_a_gateway_alone_announces_nothing(host, monkeypatch):
    await host.gateways[1].__aexit__()
    clients = [link.client for link in host.gateways[0].links.links.values()]
    await eventually(lambda: all(client.reports.num_gateways == 1 for client in clients))
    announced = []
    for client in clients:
        monkeypatch.setattr(client.reports, "announce", announced.append)
    task, _ = await host.start(0, text(0, token_s=0.0))
    await task
    assert announced == []
