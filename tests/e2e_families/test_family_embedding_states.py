"""The states of an embedding in each family, by the whole system: answers are plain vLLM's, and nothing that is known
is encoded again. `-k gemma3` tests one family.

Each has two workers and an encoder, which the first test kills: from then on the workers encode. The last one kills a
worker. Neither is restarted, which would take most of the time: the supervisor is suspended.
"""

import asyncio
import os
import signal
from dataclasses import dataclass
from itertools import count

import pytest
import pytest_asyncio
from embedding_requests import Engines, ask, at_both_workers, evict, evict_unheld, nothing_is_held
from medialane_process import FORKING_VLLM, ONE_PROCESS_ENGINE, PING_S, START_S, MedialaneProcess, free_port, kill
from openai_http import OpenAiHttp, in_flight, load, long_chat
from process_tree import descendants, suspended
from tiny_families import FAMILIES

from host_state import stats_of, store_link
from medialane.testing.tiny_model import cache_folder
from medialane.tools.check import compare, plain_vllm
from medialane.tools.check.media import audio, image, text, video
from poison import PROGRAM
from waiting import eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,  # four engines start for each family; tests/e2e has these states for Qwen2.5-VL
    pytest.mark.timeout(600),
]

ASK = text("What do you make of it?")
OPTIONS = {"logprobs": True, "top_logprobs": 2}

#: Of an encoder-decoder, no embeddings are kept.
KEPT = [pytest.param(name, marks=found.marks) for name, found in FAMILIES.items() if not found.has_encoder_prompt]

SERVE = (
    *("--workers", "2", "--encoders", "1", "--encode-at", "encoders", "--encode-cache", "on"),
    *("--preparers", "1", "--arena-size", "256MiB", "--verbose", "--worker-ping-interval", str(PING_S)),
    # The encoder is killed while it has items: none is to be late before.
    *("--gateway-encode-timeout", "60"),
)


@dataclass
class Case:
    """The servers of one family, and how many items of each modality a request may have."""

    limits: dict
    serve: MedialaneProcess
    plain: OpenAiHttp
    workers: Engines
    encoder: Engines
    worker_pids: dict
    encoder_pid: int
    seeds: count

    @property
    def ours(self):
        return OpenAiHttp(self.serve.base_url, self.serve.model)

    @property
    def modalities(self):
        return list(self.limits)

    def new(self, modality):
        """An item that no request has had."""
        seed = next(self.seeds)
        match modality:
            case "image":
                return image(seed, 320, 240)
            case "video":
                return video(seed, 8, 128, 96)
            case "audio":
                return audio(200 + 11 * seed, 1.5)

    def one_of_each(self):
        return list(map(self.new, self.modalities))

    def question(self):
        """A beginning that no prompt has had: nothing of it is in a KV cache."""
        return text(f"Question {next(self.seeds)}:")

    async def ask(self, *items):
        return await ask(self.ours, self.question(), *items, ASK, **OPTIONS)

    async def equals_plain(self, found):
        """Assert that the response is plain vLLM's, logprobs included."""
        expected = await self.plain.succeed(found.body)
        ours = {name: value for name, value in found.answer.json.items() if name != "medialane"}
        difference = compare(ours, expected.json)
        assert (difference.first, difference.largest) == ("", 0.0)

    async def asked_and_compared(self, *items):
        found = await self.ask(*items)
        await self.equals_plain(found)
        return found

    def engine_pids(self):
        """The processes of the workers' engines."""
        return [pid for worker in self.worker_pids.values() for pid in descendants(worker)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KEPT)
async def case(request, environ, tmp_path_factory):
    family = FAMILIES[request.param]
    model, logs = str(family.build(cache_folder(os.environ))), tmp_path_factory.mktemp(family.name)
    flags = (*family.flags, f"--kv-cache-memory-bytes={256 << 20}")
    environ = {name: value for name, value in environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}  # it would override
    port = free_port(3)
    own = (*SERVE, "--metrics-port", str(port))
    serve = MedialaneProcess.spawn(
        "serve", model, own, flags, environ=environ, log=logs / "serve.log", program=[str(PROGRAM)]
    )
    try:
        async with plain_vllm(
            model,
            (*flags, ONE_PROCESS_ENGINE),
            environ=environ,
            log=logs / "plain.log",
            start_s=START_S,
            program=FORKING_VLLM,
        ) as plain:
            await serve.answers()
            addresses, client = serve.worker_addresses(), OpenAiHttp(serve.base_url, serve.model)

            async def are_ready():
                page = await client.metrics()
                ready = [page.value("medialane_worker_transport", worker=a, transport="shm") for a in addresses]
                return len(addresses) == 3 and all(ready)

            await eventually(are_ready, "all workers are ready", START_S, more=serve.tail)
            pids = {address: serve.worker_pid(address) for address in addresses}
            (encoder,) = [address for address in addresses if "encoder" in address]
            yield Case(
                limits=dict(family.limits),
                serve=serve,
                plain=OpenAiHttp(plain.base_url.removesuffix("/v1"), model),
                workers=Engines(port, 2),
                encoder=Engines(port + 2, 1),
                encoder_pid=pids.pop(encoder),
                worker_pids=pids,
                seeds=count(1000),
            )
    finally:
        serve.process.send_signal(signal.SIGCONT)
        assert serve.stop() == 0, serve.tail()


@pytest.fixture
async def store(case):
    async with store_link(case.serve.store_address) as link:
        yield link


async def are_writing(store, number):
    return (await stats_of(store)).embeddings.num_writing == number


async def test_new_items_are_encoded_by_the_encoder(case):
    for modality in case.modalities:
        before, encoded = await case.workers.counts(), await case.encoder.count("encoded")
        found = await case.asked_and_compared(case.new(modality))
        assert found.outcomes == ["loaded"]
        assert await case.workers.counts() == [before[0], before[1] + 1]
        assert await case.encoder.count("encoded") == encoded + 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def last_of_the_encoder(case):
    """What was asked when the encoder was killed, which had begun to write an embedding for each."""
    engines = descendants(case.encoder_pid)
    async with store_link(case.serve.store_address) as store:
        with suspended(*engines):
            asked = [asyncio.create_task(case.ask(case.new(modality))) for modality in case.modalities]
            await eventually(lambda: are_writing(store, len(asked)), "the encoder has the items", 60)
            os.kill(case.serve.pid, signal.SIGSTOP)
            for pid in (case.encoder_pid, *engines):
                kill(pid)
        return await asyncio.gather(*asked)


async def test_items_of_a_killed_encoder_are_encoded_by_the_workers(case, store, last_of_the_encoder):
    for found in last_of_the_encoder:
        assert found.outcomes in (["encoded"], ["unkept"]), "the store may still count them as the encoder's"
        assert found.answer.ids == (await case.plain.succeed(found.body)).ids
    await nothing_is_held(store)


@pytest.mark.usefixtures("last_of_the_encoder")
async def test_known_item_is_loaded_by_both_workers(case):
    for modality in case.modalities:
        (encoded, loaded), item = await case.workers.counts(), case.new(modality)
        first = await case.asked_and_compared(item)
        assert first.outcomes == ["encoded"]
        assert await case.workers.counts() == [encoded + 1, loaded]
        again = await case.asked_and_compared(item)
        assert again.outcomes == ["loaded"]
        at_both = await at_both_workers(case.ours, case.question(), item, ASK, **OPTIONS)
        assert set(at_both) == set(case.worker_pids)
        for found in at_both.values():
            assert found.outcomes == ["loaded"]
            assert found.answer.ids == (await case.plain.succeed(found.body)).ids
        after = await case.workers.counts()
        assert after[0] == encoded + 1
        assert after[1] > loaded, "by the other worker: the first one has it in its engine's encoder cache"


@pytest.mark.usefixtures("last_of_the_encoder")
async def test_known_item_is_loaded_when_its_pixels_are_evicted_and_memory_is_short_between_routing_and_load(
    case, store
):
    """Evicted memory is overwritten."""
    for modality in case.modalities:
        item = case.new(modality)
        await case.ask(item)
        before = (await case.workers.counts())[0]

        async def are_evicted():
            evict_unheld(case.serve)
            arena = (await stats_of(store)).arena
            return (arena.processed_bytes, arena.decoded_bytes, arena.encoded_bytes) == (0, 0, 0)

        with suspended(*case.engine_pids()):
            asked = asyncio.create_task(case.ask(item))
            await eventually(lambda: in_flight(case.ours, 1), "the request is at a worker", 30)
            await eventually(are_evicted, "pixels and files are evicted", 30)
            assert (await stats_of(store)).arena.embedded_bytes
        for found in (await asked, await case.ask(item)):
            assert found.outcomes == ["loaded"]
            await case.equals_plain(found)
        assert (await case.workers.counts())[0] == before


@pytest.mark.usefixtures("last_of_the_encoder")
async def test_evicted_embedding_is_made_again(case, store):
    for modality in case.modalities:
        item = case.new(modality)
        await case.ask(item)
        await evict(case.serve, store)
        for expected in ("encoded", "loaded"):
            found = await case.asked_and_compared(item)
            assert found.outcomes == [expected]


@pytest.mark.usefixtures("last_of_the_encoder")
async def test_one_of_several_items_is_known(case):
    for modality, limit in case.limits.items():
        others = [case.new(other) for other in case.modalities if other != modality]
        others += [case.new(modality)] if limit > 1 else []
        if not others:
            continue
        known = case.new(modality)
        await case.ask(known)
        before = (await case.workers.counts())[0]
        found = await case.asked_and_compared(known, text("and"), *others)
        assert found.outcomes == ["loaded", *["encoded"] * len(others)]
        assert (await case.workers.counts())[0] == before + len(others)


@pytest.mark.usefixtures("last_of_the_encoder")
async def test_client_that_leaves_while_embeddings_are_written_leaves_nothing(case, store):
    items = case.one_of_each()
    with suspended(*case.engine_pids()):
        # Unseeded: on a CPU, vLLM's engine ends when a seeded request's prompt is computed in several steps.
        body = long_chat(case.question(), *items, ASK, max_tokens=3000, seed=None)
        leaving = asyncio.create_task(case.ours.post(body))
        await eventually(lambda: are_writing(store, len(items)), "memory is reserved at the engine", 30)
        leaving.cancel()
        await asyncio.wait([leaving])
    await eventually(lambda: in_flight(case.ours, 0), "the request has ended", 30)
    await nothing_is_held(store)
    found = await case.asked_and_compared(*items)
    assert set(found.outcomes) <= {"encoded", "loaded"}


@pytest.mark.usefixtures("last_of_the_encoder")
async def test_items_of_a_killed_worker_are_encoded_by_the_other(case, store):
    """Last: the worker is not restarted."""
    num_migrated = (await case.ours.metrics()).value("medialane_migrations_total")
    items = case.one_of_each()
    with suspended(*case.engine_pids()):
        asked = asyncio.create_task(case.ask(*items))
        await eventually(lambda: are_writing(store, len(items)), "memory is reserved at the engine", 30)
        (killed,) = [address for address, number in (await load(case.ours)).items() if number]
        worker = case.worker_pids[killed]
        for pid in (*descendants(worker), worker):
            kill(pid)
    found = await asked
    await case.equals_plain(found)
    assert set(found.outcomes) <= {"encoded", "unkept"}, "the store may still count them as the killed worker's"
    assert found.worker != killed
    assert (await case.ours.metrics()).value("medialane_migrations_total") == num_migrated + 1
    await nothing_is_held(store)
    again = await case.asked_and_compared(*items)
    assert again.worker == found.worker
    if found.outcomes == ["encoded"] * len(items):
        assert set(again.outcomes) == {"loaded"}
