"""Prompts that one worker computes and another one continues: a gateway and workers over real sockets and a real arena,
with fake engines."""

import asyncio
import gc
import tempfile

import msgspec
import pytest
from gateway_parts import FakeWorker, Parts, png, prompt, request

from fake_engine import FAKE_CARD, FakeContinuable, KvBlocks
from medialane.gateway import GatewayConfig, open_scope
from medialane.routing import RoutingConfig
from medialane.types.errors import GenerationFailed, HandoverFailed, PromptRejected, WorkerBusy, WorkerLost
from waiting import eventually

CARD = msgspec.structs.replace(FAKE_CARD, kv_group="group")
FAST = {"reconnect_initial_s": 0.01, "reconnect_max_s": 0.05}
TEXT = list(range(200, 400))


class Host:
    """A gateway, workers that prefill and workers that decode, which are closed at the end."""

    def __init__(self, arena, preparers, folder):
        self.arena, self._preparers, self._folder = arena, preparers, folder
        self.blocks = KvBlocks()
        self.prefill, self.decode = [], []

    async def start(self, *, prefill=1, decode=1, group="group", **routing):
        self.prefill = [await self._worker(f"p{n}", "prefill", "group") for n in range(prefill)]
        self.decode = [await self._worker(f"d{n}", "decode", group) for n in range(decode)]
        self.parts = Parts(
            self.arena,
            self._preparers,
            [*self.prefill, *self.decode],
            config=GatewayConfig(**FAST),
            routing=RoutingConfig(**{"prefill_at": "prefill", "split_tokens": 1, **routing}),
        )
        return await self.parts.__aenter__()

    async def _worker(self, name, role, group):
        card = msgspec.structs.replace(CARD, role=role, kv_group=group)
        worker = FakeWorker(f"{self._folder}/{name}.sock", arena=self.arena, card=card, kv_blocks=self.blocks)
        await worker.start()
        return worker

    async def close(self):
        await self.parts.__aexit__()
        for worker in [*self.prefill, *self.decode]:
            await worker.close()
            worker.engine.recover()

    @property
    def p(self):
        return self.prefill[0].engine

    @property
    def d(self):
        return self.decode[0].engine

    def outcomes(self):
        samples = [s for metric in self.parts.registry.collect() for s in metric.samples]
        found = {s.labels["outcome"]: int(s.value) for s in samples if s.name == "medialane_prefills_total"}
        return {outcome: count for outcome, count in found.items() if count}

    async def answer(self, *datas, **params):
        with open_scope() as scope:
            self.record = scope.record
            return await self.parts.answer(prompt(*datas), **params)

    async def text(self, token_ids=None, request_id="r", *, continuable=None, **params):
        with open_scope() as scope:
            self.record = scope.record
            wanted = request(request_id, token_ids or TEXT, **params)
            deltas = self.parts.gateway.generate(wanted, None, continuable)
            return [token async for delta in deltas for token in delta.completions[0].token_ids]


@pytest.fixture
async def host(arena, preparers):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        host = Host(arena, preparers, folder)
        yield host
        await host.close()
    gc.collect()


@pytest.fixture
async def expected(host):
    """The answer to TEXT of one worker."""
    await host.start(prefill=0)
    tokens = await host.text()
    assert host.outcomes() == {"no_prefill_worker": 1}
    await host.close()
    return tokens


async def nothing_is_kept(host):
    await eventually(lambda: not host.blocks.kept, "all KV blocks are released")
    engines = [worker.engine for worker in (*host.prefill, *host.decode)]
    await eventually(lambda: not any(engine.num_reading for engine in engines), "no engine has a request")


async def test_prompt_is_computed_by_one_worker_and_continued_by_another(host, expected):
    await host.start()
    assert await host.text() == expected
    assert (host.p.num_computed, host.d.num_computed) == (len(TEXT), 1)
    assert host.outcomes() == {"split": 1}
    found = host.record.prefill
    assert (found.outcome, found.worker, found.transferred_tokens) == ("split", host.prefill[0].address, len(TEXT) - 1)
    assert host.parts.count("medialane_prompt_tokens_total", kind="transferred") == len(TEXT) - 1
    assert host.parts.count("medialane_prompt_tokens_total", kind="all") == len(TEXT)
    assert host.record.generated_tokens == len(expected)
    await nothing_is_kept(host)


async def test_media_are_encoded_by_the_worker_that_computes_the_prompt_alone(host):
    await host.start(prefill=0)
    expected = await host.answer(png(seed=0), png(seed=1))
    await host.close()
    await host.start()
    assert await host.answer(png(seed=0), png(seed=1)) == expected
    assert (host.p.num_encoded, host.d.num_encoded) == (2, 0)
    await nothing_is_kept(host)


async def test_cached_tokens_are_those_of_the_worker_that_has_computed_the_prompt(host):
    await host.start()
    await host.text()
    with open_scope() as scope:
        deltas = [delta async for delta in host.parts.gateway.generate(request("again", TEXT), None)]
    assert host.outcomes() == {"split": 2}
    assert {delta.num_cached_tokens for delta in deltas} == {192}
    assert scope.record.cached_tokens == 192


async def test_next_turn_is_computed_where_most_of_it_is_cached(host):
    """The worker of the answer has all of the first turn: what is new is too little to be transferred."""
    await host.start(split_tokens=64)
    await host.text()
    await host.text([*TEXT, 1, 2, 3])
    assert host.outcomes() == {"split": 1, "few_tokens": 1}
    assert host.p.num_requests == 1
    assert host.record.prefill.outcome == "few_tokens"


@pytest.mark.parametrize("group", ["", "another"])
async def test_worker_that_cannot_read_the_blocks_computes_the_prompt(host, group, expected):
    await host.start(group=group)
    assert await host.text() == expected
    assert host.outcomes() == {"no_prefill_worker": 1}


async def test_workers_that_only_prefill_answer_if_there_are_no_others(host, expected):
    await host.start()
    await host.decode[0].close()
    await eventually(lambda: host.parts.links.num_ready == 1)
    assert await host.text() == expected
    assert host.p.num_requests == 1


def refuse(engine, error):
    """Have the engine refuse requests, but for the release of blocks."""
    generate = engine.generate

    async def refusing(request, *args):
        if request.kv_transfer is None or request.kv_transfer.step != "release":
            raise error
        async for delta in generate(request, *args):
            yield delta

    engine.generate = refusing


@pytest.mark.parametrize(
    "error",
    [GenerationFailed("no"), WorkerBusy("no room"), HandoverFailed("no"), WorkerLost("no")],
    ids=lambda e: e.code,
)
async def test_prompt_that_is_not_computed_elsewhere_is_computed_by_the_worker_of_the_answer(host, error, expected):
    await host.start()
    refuse(host.p, error)
    assert await host.text() == expected
    assert host.outcomes() == {"failed": 1}
    assert host.d.num_computed == len(TEXT)
    await nothing_is_kept(host)


async def test_rejected_prompt_is_rejected_once(host):
    await host.start()
    refuse(host.p, PromptRejected("the prompt is wrong"))
    with pytest.raises(PromptRejected, match="the prompt is wrong"):
        await host.text()
    assert (host.d.num_requests, host.outcomes()) == (0, {})


async def test_prefill_worker_killed_in_its_part_leaves_the_prompt_to_the_other(host, expected):
    await host.start()
    host.p.stall()
    running = asyncio.create_task(host.text())
    await eventually(lambda: host.p.num_reading)
    host.p.resume()
    await host.prefill[0].close()
    assert await running == expected
    await nothing_is_kept(host)


async def test_transfer_that_fails_is_computed_again_and_reported(host, expected):
    await host.start()
    host.blocks.is_broken = True
    assert await host.text() == expected
    assert host.d.num_computed == len(TEXT)
    assert (host.record.prefill.outcome, host.record.prefill.transferred_tokens) == ("split", 0)


async def test_blocks_are_released_when_the_workers_of_the_answer_have_no_room(host, expected):
    """Then a worker that only prefills does all of it."""
    await host.start(decode=2)
    for worker in host.decode:
        refuse(worker.engine, WorkerBusy("no room"))
    assert await host.text() == expected
    assert host.blocks.num_sent == 2
    await nothing_is_kept(host)


async def test_blocks_that_cannot_be_read_are_released_and_the_prompt_computed(host, expected):
    await host.start()
    generate, refused = host.d.generate, []

    async def refusing(request, *args):
        if request.kv_transfer is not None and request.kv_transfer.step == "receive":
            refused.append(request)
            raise HandoverFailed("the engine has failed a request with KV blocks of another one")
        async for delta in generate(request, *args):
            yield delta

    host.d.generate = refusing
    assert await host.text() == expected
    assert (len(refused), host.d.num_computed, host.p.num_requests) == (1, len(TEXT), 1)
    await nothing_is_kept(host)


async def test_lost_worker_of_the_answer_is_replaced(host, expected):
    await host.start(decode=2)
    for worker in host.decode:
        worker.engine.stall()
    running = asyncio.create_task(host.text())
    await eventually(lambda: any(worker.engine.num_reading for worker in host.decode))
    (busy,) = [worker for worker in host.decode if worker.engine.num_reading]
    for worker in host.decode:
        worker.engine.resume() if worker is not busy else None
    busy.drop_connections()
    busy.engine.resume()
    assert await running == expected
    await nothing_is_kept(host)


async def test_answer_that_has_begun_goes_on_at_another_worker(host):
    await host.start(prefill=0)
    params = {"max_tokens": 8}
    expected = await host.text(**params)
    await host.close()
    await host.start(decode=2)
    wanted = request("r", TEXT, token_s=0.02, **params)
    tokens = []
    with open_scope():
        async for delta in host.parts.gateway.generate(wanted, None, FakeContinuable(wanted.sampling_params)):
            if not tokens:
                (busy,) = [worker for worker in host.decode if worker.engine.num_reading]
                busy.drop_connections()
            tokens += delta.completions[0].token_ids
    assert tokens == expected
    await nothing_is_kept(host)


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_client_that_leaves_leaves_no_blocks_behind(host, where):
    await host.start()
    engine = host.p if where == "prefill" else host.d
    engine.stall()
    running = asyncio.create_task(host.text())
    await eventually(lambda: engine.num_reading)
    running.cancel()
    await asyncio.wait([running])
    engine.resume()
    await nothing_is_kept(host)


@pytest.mark.parametrize("has_media", [False, True], ids=["text", "media"])
async def test_client_that_leaves_at_any_moment_leaves_no_blocks_behind(host, has_media):
    """After each number of steps of the event loop that gateway and workers share here; with media, since its prompt is
    being computed."""
    await host.start()
    num_steps, is_whole = 0, False
    while not is_whole:
        asked = host.answer(png(seed=num_steps)) if has_media else host.text([*TEXT, num_steps])
        if has_media:
            host.p.stall()
        running = asyncio.create_task(asked)
        if has_media:
            await eventually(lambda: host.p.num_reading)
            host.p.resume()
        for _ in range(num_steps):
            await asyncio.sleep(0)
        is_whole = running.done()
        running.cancel()
        await asyncio.wait([running])
        num_steps += 1
        await nothing_is_kept(host)
    assert host.blocks.num_sent > 1


async def test_error_of_the_worker_of_the_answer_releases_the_blocks(host):
    await host.start()
    refuse(host.d, GenerationFailed("no"))
    with pytest.raises(GenerationFailed, match="no"):
        await host.text()
    assert host.blocks.num_sent == 1
    await nothing_is_kept(host)


async def test_idle_worker_of_the_answer_computes_the_prompt_itself(host):
    await host.start(prefill_at="auto")
    await host.text()
    assert host.outcomes() == {"cheaper": 1}
