"""Tensors sent by value, from an arena to a worker's engine, with both ends on one loop."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest
import uvloop
from gateway_parts import FakeWorker, request

from medialane.arena import describe
from medialane.gateway.workers import RpcClient
from medialane.types.errors import WorkerLost
from medialane.types.feature import Feature, MediaPayload, PlaceholderRange
from medialane.types.media import MediaSize
from medialane.types.request import ExpandedPrompt, UnexpandedPrompt
from medialane.types.tensor import InlineTensor, TensorSpec
from medialane.wire import Hello, RpcConfig

MIB = 1 << 20
NUM_BYTES = 19 * MIB

#: The product allows itself 10 ms; here both ends share a loop, and the machine its caches with other tests.
MOST_HELD_S = 0.025


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def stored(arena):
    """A tensor in the arena, and the pin that pins it."""
    reservation = arena.reserve(NUM_BYTES)
    np.frombuffer(reservation.buffer, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, NUM_BYTES, np.uint8)
    (tensor,) = tensors = describe(reservation.range, (TensorSpec("uint8", (NUM_BYTES,)),))
    with arena.publish(reservation, "key", Feature("image", "key", b"", tensors, MediaSize())):
        yield tensor


@asynccontextmanager
async def connected(arena):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        worker = FakeWorker(f"{folder}/w.sock", arena=arena)
        await worker.start()
        client = await RpcClient.connect(worker.address, Hello(gateway_id="gateway"), RpcConfig())
        try:
            yield worker, client
        finally:
            await client.close()
            await worker.close()


class LoopWatch:
    """The longest CPU time of one loop iteration: other processes do not count."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last_s = time.thread_time()
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        now = time.thread_time()
        self.longest_s = max(self.longest_s, now - self._last_s)
        self._last_s = now
        self._next = self._loop.call_soon(self._tick)

    def stop(self) -> float:
        self._next.cancel()
        return self.longest_s


def by_value(arena, stored):
    return InlineTensor(stored.spec, arena.view.tensor(stored))


def inline_request(arena, stored):
    handed = by_value(arena, stored)
    wanted = request("r", [1], max_tokens=1)
    item = MediaPayload("image", "h", b"", (handed,))
    return type(wanted)("r", UnexpandedPrompt([1], (item,)), wanted.sampling_params)


async def test_sending_a_large_tensor_does_not_block_the_event_loop(arena, stored):
    async with connected(arena) as (worker, client):
        found = []

        async def generate(wanted, tensors, _embeddings):
            found.extend(tensors)
            async for delta in given(request("r", [1], max_tokens=1), []):
                yield delta

        given, worker.engine.generate = worker.engine.generate, generate
        wanted = inline_request(arena, stored)
        watch = LoopWatch()
        remote = client.requests.submit(wanted)
        assert [delta async for delta in remote]
        held_s = watch.stop()
    ((data,),) = found
    assert np.array_equal(np.frombuffer(data, np.uint8), np.frombuffer(arena.view.tensor(stored), np.uint8))
    assert held_s < MOST_HELD_S


async def test_other_requests_proceed_while_a_large_tensor_is_sent(arena, stored):
    async with connected(arena) as (worker, client):
        large = client.requests.submit(inline_request(arena, stored))
        await asyncio.sleep(0)
        small = client.requests.submit(request("small", [1, 2], max_tokens=2))
        assert sum([len(delta.completions[0].token_ids) async for delta in small]) == 2
        assert worker.engine.num_requests == 1, "the large one has not arrived"
        assert [delta async for delta in large]


async def test_worker_lost_during_a_transfer_leaves_no_open_view(arena, stored):
    async with connected(arena) as (worker, client):
        wanted = inline_request(arena, stored)
        remote = client.requests.submit(wanted)
        await asyncio.sleep(0)
        worker.drop_connections()
        with pytest.raises(WorkerLost):
            await anext(remote)
        assert worker.engine.num_requests == 0
        wanted.prompt.media[0].tensors[0].data.release()  # raises BufferError while a piece of it is exported


async def test_expanded_and_unexpanded_prompts_with_inline_features_give_equal_outputs(arena, stored):
    async with connected(arena) as (worker, client):
        handed = by_value(arena, stored)
        wanted = request("r", [1, 2], max_tokens=1)
        item = MediaPayload("image", "h", b"", (handed,), placeholder=PlaceholderRange(1, 1))
        sent = type(wanted)("r", ExpandedPrompt([1, 2], (item,)), wanted.sampling_params)
        one = [delta async for delta in client.requests.submit(sent)]
        other = type(wanted)("s", UnexpandedPrompt([1, 2], (item,)), wanted.sampling_params)
        assert [d.completions for d in one] == [[*d.completions] async for d in client.requests.submit(other)]
        assert worker.engine.num_reading == 0
