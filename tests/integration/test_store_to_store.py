"""From a gateway to a worker of another host: the worker's own store copies the media, once."""

from __future__ import annotations

import asyncio
import gc
import json
import tempfile
from contextlib import AsyncExitStack, aclosing

import pytest
from gateway_parts import FakeWorker, Parts, png, prompt, request
from host_store import HostStore
from msgspec.structs import replace

from embedding_memory import ENCODER_CARD
from fake_engine import FakeContinuable, KvBlocks
from medialane.arena import Arena, ArenaConfig
from medialane.gateway import GatewayConfig, HandoverConfig, open_scope
from medialane.gateway.intake import ExtractedMedia
from medialane.gateway.records import request_report
from medialane.routing import RoutingConfig
from medialane.store import StoreGrants
from medialane.transfer import StillWriting
from medialane.types.errors import WorkerLost
from waiting import eventually

FAST = {"reconnect_initial_s": 0.01, "reconnect_max_s": 0.05}


class OtherHost:
    """An arena directory of its own, with a store and workers: nothing there maps the arena of the gateway's host."""

    def __init__(self, folder: str, arena: Arena, store: HostStore, stack: AsyncExitStack) -> None:
        self.arena = arena
        self.store = store
        self._folder = folder
        self._stack = stack
        self._num_workers = 0

    async def worker(self, **engine) -> FakeWorker:
        self._num_workers += 1
        worker = FakeWorker(f"{self._folder}/{self._num_workers}.sock", arena=self.arena, **engine)
        self._stack.push_async_callback(worker.close)
        await worker.start()
        return worker

    @property
    def num_pulls(self) -> int:
        return self.store.pulls.stats.num_pulls.get("tcp", 0)


class StuckMover:
    """A nixl whose reads are given up. `ended` is set when their destinations may be reused."""

    name = "nixl"

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def is_ready(self) -> bool:
        return True

    async def offer(self, *, wait: bool) -> bytes:
        return b"metadata"

    async def read(self, source, destination, *, deadline_s: float) -> None:
        raise StillWriting(self.ended.wait())

    async def close(self) -> None:
        """Nothing to end."""


@pytest.fixture
async def other_host(request):
    mover = request.param() if hasattr(request, "param") else None
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="host-") as folder:
        arena = Arena.create(ArenaConfig(size_bytes=32 << 20, directory=folder))
        async with AsyncExitStack() as stack:
            stack.callback(arena.close)
            store = await stack.enter_async_context(HostStore(arena, None, None, mover=mover))
            yield OtherHost(folder, arena, store, stack)
            await eventually(lambda: arena.stats().num_leases == 0, "pins end with their requests")
        assert arena.stats().num_reservations == 0
    gc.collect()


def parts_for(arena, preparers, workers, *, transport="auto", stage="auto", **options):
    config, handover = GatewayConfig(stage=stage, **FAST), HandoverConfig(transport=transport)
    return Parts(arena, preparers, workers, config=config, handover=handover, **options)


class UnreachableGrants(StoreGrants):
    """Of a store that nobody listens for."""

    async def grant(self, ranges):
        return [replace(entry, address="tcp://127.0.0.1:1") for entry in await super().grant(ranges)]


async def answer_and_report(parts, media):
    """The answer, and what its report says about the hand-over: stage, transport, movers."""
    with open_scope() as scope:
        scope.extracted = ExtractedMedia(media.items, wants_report=True)
        scope.record.received(media.items, model=None, streams=False)
        answer = await parts.answer(media)
        report = json.loads(request_report(scope.record))
    return answer, (report["stage"], report["transport"], *report.get("movers", ()))


@pytest.mark.parametrize("stage", ["features", "decoded", "url"])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
async def test_every_kind_of_entry_is_pulled_and_gives_the_same_output(
    arena, preparers, worker, other_host, stage, transport
):
    images = [png(), png(seed=1), png()]
    async with parts_for(arena, preparers, [worker], stage=stage) as near:
        with open_scope():
            expected = await near.answer(prompt(*images))
    async with parts_for(arena, preparers, [await other_host.worker()], stage=stage, transport=transport) as far:
        assert await answer_and_report(far, prompt(*images)) == (expected, (stage, "pull", "tcp"))
        assert other_host.num_pulls == 2, "the repeated image is pulled once"


async def test_second_worker_of_a_host_costs_no_second_pull(arena, preparers, other_host):
    workers = [await other_host.worker(), await other_host.worker()]
    async with parts_for(arena, preparers, workers[:1]) as first:
        with open_scope():
            expected = await first.answer(prompt(png()))
        async with parts_for(arena, preparers, workers[1:], beside=first) as second:
            with open_scope():
                assert await second.answer(prompt(png())) == expected
    assert other_host.num_pulls == 1


@pytest.mark.parametrize("request_id", ["r{}".format, "r".format], ids=["own", "same"])
async def test_concurrent_requests_pull_an_entry_once(arena, preparers, other_host, request_id):
    """Whatever the ids that their clients have chosen."""
    async with parts_for(arena, preparers, [await other_host.worker(), await other_host.worker()]) as parts:

        async def one(number):
            with open_scope():
                return await parts.answer(prompt(png()), request_id(number))

        answers = await asyncio.gather(*[one(number) for number in range(8)])
    assert len({tuple(answer) for answer in answers}) == 1
    assert other_host.num_pulls == 1


@pytest.mark.parametrize("stage", ["features", "decoded", "url"])
async def test_request_counts_at_its_worker_before_its_pull_is_granted(arena, preparers, other_host, stage):
    """Otherwise concurrent requests with one image, each routed as if the others did not exist, are spread."""
    reached, granted = asyncio.Event(), asyncio.Event()

    class SlowGrants(StoreGrants):
        async def grant(self, ranges):
            reached.set()
            await granted.wait()
            return await super().grant(ranges)

    workers = [await other_host.worker()]
    async with parts_for(arena, preparers, workers, stage=stage, grants=SlowGrants) as parts:
        with open_scope() as scope:
            answering = asyncio.create_task(parts.answer(prompt(png())))
            await reached.wait()
            assert [attempt.is_sent for attempt in scope.record.attempts] == [False]
            assert parts.router.mean_sequences == 1
            granted.set()
            await answering
            assert [attempt.is_sent for attempt in scope.record.attempts] == [True]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
async def test_pull_that_fails_falls_back_to_another_path_with_the_same_output(
    arena, preparers, worker, other_host, transport
):
    stage = "features" if transport == "auto" else "url"
    async with parts_for(arena, preparers, [worker], stage=stage) as near:
        with open_scope():
            expected = await near.answer(prompt(png()))
    workers = [await other_host.worker()]
    async with parts_for(arena, preparers, workers, transport=transport, grants=UnreachableGrants) as far:
        assert await answer_and_report(far, prompt(png())) == (expected, (stage, "inline"))
        assert far.count("medialane_transfer_fallbacks_total", path="features/pull", reason="transfer_failed") == 1


async def test_nixl_that_is_chosen_and_missing_falls_back_with_the_same_output(arena, preparers, worker, other_host):
    async with parts_for(arena, preparers, [worker], stage="url") as near:
        with open_scope():
            expected = await near.answer(prompt(png()))
    async with parts_for(arena, preparers, [await other_host.worker()], transport="nixl") as far:
        assert await answer_and_report(far, prompt(png())) == (expected, ("url", "inline"))
        assert far.count("medialane_transfer_fallbacks_total", path="features/pull", reason="transfer_failed") == 1
    assert other_host.num_pulls == 0


@pytest.mark.parametrize("other_host", [StuckMover], indirect=True)
@pytest.mark.parametrize(("transport", "sent"), [("nixl", ("url", "inline")), ("auto", ("features", "pull", "tcp"))])
async def test_read_that_is_given_up_falls_back_to_the_next_mover_or_stage_with_the_same_output(
    arena, preparers, worker, other_host, transport, sent
):
    """With `auto`, tcp is next."""
    stuck = other_host.store.mover
    async with parts_for(arena, preparers, [worker], stage=sent[0]) as near:
        with open_scope():
            expected = await near.answer(prompt(png()))
    workers = [await other_host.worker()]
    async with parts_for(arena, preparers, workers, transport=transport, mover=StuckMover()) as far:
        assert await answer_and_report(far, prompt(png())) == (expected, sent)
        num_given_up = far.count("medialane_transfer_fallbacks_total", path="features/pull", reason="transfer_timeout")
        assert num_given_up == (transport == "nixl")
    stuck.ended.set()
    await eventually(lambda: other_host.store.pulls.stats.num_quarantined == 0)


async def test_full_arena_at_the_worker_falls_back(arena, preparers, other_host):
    async with parts_for(arena, preparers, [await other_host.worker()]) as far:
        with other_host.arena.reserve(31 << 20):
            _, sent = await answer_and_report(far, prompt(png(600, 400)))
        assert sent == ("features", "inline")


async def test_request_that_is_aborted_during_its_pull_leaves_nothing(arena, preparers, other_host, monkeypatch):
    reached = asyncio.Event()

    async def stalled(self, entry, payload, *, deadline):
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("medialane.transfer.peers.Peers.fetch", stalled)
    async with parts_for(arena, preparers, [await other_host.worker()]) as far:

        async def one():
            with open_scope():
                await far.answer(prompt(png()))

        answering = asyncio.create_task(one())
        await reached.wait()
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        await eventually(lambda: other_host.arena.stats().num_reservations == 0)
        await eventually(lambda: arena.stats().num_leases == 0, "the source's hold has ended")


class Split:
    """A worker of the gateway's host that computes prompts, `p`, and one of the other host that continues them, `d`."""

    def __init__(self, parts: Parts, p: FakeWorker, d: FakeWorker) -> None:
        self.parts, self.p, self.d = parts, p, d

    async def answer(self, *, obstacle: str | None = "", **params: object) -> list[int]:
        """With None as obstacle, as one that can in no way go on elsewhere."""
        with open_scope():
            prepared = await self.parts.gateway.prepare(prompt(png(), png(seed=1)))
            wanted = request("r", prepared.token_ids, **params)
            rest = None if obstacle is None else FakeContinuable(wanted.sampling_params, obstacle)
            async with asyncio.timeout(10), aclosing(self.parts.gateway.generate(wanted, prepared, rest)) as deltas:
                return [token async for delta in deltas for token in delta.completions[0].token_ids]

    @property
    def num_encoded(self) -> tuple[int, int]:
        return self.p.engine.num_encoded, self.d.engine.num_encoded


@pytest.fixture
async def right(arena, preparers, worker):
    """The answer of one worker to what `Split` asks."""
    async with parts_for(arena, preparers, [worker]) as near:
        return await Split(near, worker, worker).answer()


@pytest.fixture
async def split(arena, preparers, other_host, right):
    blocks, routing = KvBlocks(), RoutingConfig(prefill_at="prefill", split_tokens=1)
    cards = {role: replace(ENCODER_CARD, role=role, kv_group="group") for role in ("prefill", "decode")}
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        p = FakeWorker(f"{folder}/p.sock", arena=arena, card=cards["prefill"], kv_blocks=blocks)
        await p.start()
        d = await other_host.worker(card=cards["decode"], kv_blocks=blocks)
        async with parts_for(arena, preparers, [p, d], routing=routing) as parts:
            yield Split(parts, p, d)
        await p.close()


async def test_media_of_a_prompt_whose_blocks_are_read_are_not_pulled(split, other_host, right):
    assert await split.answer() == right
    assert (other_host.num_pulls, split.num_encoded) == (0, (2, 0))


async def test_media_of_a_prompt_whose_blocks_cannot_be_read_are_pulled(split, other_host, right):
    split.d.engine.kv_blocks.is_broken = True
    assert await split.answer() == right
    assert (other_host.num_pulls, split.num_encoded) == (2, (2, 2))


@pytest.mark.parametrize("obstacle", [None, "structured output"])
async def test_media_of_an_answer_that_could_not_go_on_elsewhere_are_pulled(split, other_host, right, obstacle):
    """Its engine may have to compute the prompt again."""
    assert await split.answer(obstacle=obstacle) == right
    assert (other_host.num_pulls, split.num_encoded) == (2, (2, 0))


async def test_answer_whose_prompt_must_be_computed_again_goes_on_where_its_media_are(split, other_host, right):
    generate = split.d.engine.generate

    async def preempted(request, *args):
        async for delta in generate(request, *args):
            yield delta
            if request.without_media:
                raise WorkerLost("the engine has no media to compute the prompt again")

    split.d.engine.generate = preempted
    assert await split.answer() == right
    assert (other_host.num_pulls, split.num_encoded) == (0, (4, 0))
