"""A worker whose engine has no room for a request means another worker; the client gets an error only if none has."""

import gc
import tempfile
from contextlib import aclosing

import pytest
from gateway_parts import FakeWorker, Parts, request

from fake_engine import FakeEngine
from medialane.gateway import open_scope
from medialane.routing import RoutingConfig
from medialane.types.errors import WorkerBusy


class FullEngine(FakeEngine):
    """Refuses what comes while it has `limit` requests, as vLLM with --max-num-queued-reqs does."""

    def __init__(self, *args, limit=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.limit = limit
        self.num_asked = self.num_running = 0

    async def generate(self, request, tensors, embeddings=()):
        self.num_asked += 1
        if self.num_running >= self.limit:
            raise WorkerBusy("The engine is currently busy and cannot accept new requests.")
        self.num_running += 1
        try:
            async with aclosing(super().generate(request, tensors, embeddings)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self.num_running -= 1


@pytest.fixture
async def workers(arena):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        workers = [FakeWorker(f"{folder}/{n}.sock", arena=arena, kind=FullEngine) for n in range(2)]
        for worker in workers:
            await worker.start()
        yield workers
        for worker in workers:
            await worker.close()
    gc.collect()


@pytest.fixture
async def parts(arena, preparers, workers):
    async with Parts(arena, preparers, workers, routing=RoutingConfig(router="round-robin")) as parts:
        yield parts


def long(request_id):
    return request(request_id, [1, 2, 3], max_tokens=1000, token_s=0.01)


async def test_request_goes_to_the_worker_that_has_room(parts, workers):
    with open_scope():
        async with aclosing(parts.gateway.generate(long("first"), None)) as deltas:
            await anext(deltas)
            for n in range(4):
                with open_scope() as scope:
                    assert await parts.generate(request(f"r{n}", [1, 2, 3]), None)
                    assert scope.failure is None
    assert sum(worker.engine.num_asked for worker in workers) > 5, "some were refused first"


async def test_request_that_no_worker_has_room_for_is_told_when_one_will(parts, workers):
    with open_scope():
        async with (
            aclosing(parts.gateway.generate(long("first"), None)) as first,
            aclosing(parts.gateway.generate(long("second"), None)) as second,
        ):
            await anext(first)
            await anext(second)
            asked = [worker.engine.num_asked for worker in workers]
            with open_scope() as scope:
                with pytest.raises(WorkerBusy):
                    await parts.generate(request("third", [1, 2, 3]), None)
                assert scope.error_code == "worker_busy"
                assert scope.failure.error.retry_after_s >= 1
            assert [worker.engine.num_asked for worker in workers] == [n + 1 for n in asked], "each was asked once"
