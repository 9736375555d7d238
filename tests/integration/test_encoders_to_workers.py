"""From a new image to a worker that loads its embedding: gateway, encoders and workers over real sockets and a real
arena, with fake engines."""

import asyncio
import gc
import tempfile

import msgspec
import pytest
from gateway_parts import FakeWorker, Parts, png, prompt, request

from embedding_memory import ENCODER_CARD, ArenaEmbeddings
from medialane.gateway import GatewayConfig, RequestTracing, open_scope
from medialane.testing.fake_processor import PLACEHOLDER_TOKEN
from medialane.types.errors import GenerationFailed, HandoverFailed, InvalidFeature, NoWorkerReady, WorkerLost
from medialane.types.feature import MediaPrompt
from medialane.types.media import MediaRef
from otlp_collector import http_collector
from waiting import eventually, iterations

CARD = msgspec.structs.replace(ENCODER_CARD, role="encoder")
FAST = {"reconnect_initial_s": 0.01, "reconnect_max_s": 0.05}


class Host:
    """A gateway, workers and encoders, which are closed at the end."""

    def __init__(self, arena, preparers, folder):
        self.arena, self._preparers, self._folder = arena, preparers, folder
        self.workers, self.encoders = [], []
        self.memory = ArenaEmbeddings(str(arena.path.parent))

    async def start(self, *, workers=1, encoders=1, encode_at="encoders", timeout_s=5.0, card=CARD):
        self.workers = [await self._worker(f"w{n}", ENCODER_CARD) for n in range(workers)]
        self.encoders = [await self._worker(f"e{n}", card) for n in range(encoders)]
        config = GatewayConfig(encode_at=encode_at, encode_timeout_s=timeout_s, **FAST)
        self.parts = Parts(self.arena, self._preparers, [*self.workers, *self.encoders], config=config)
        return await self.parts.__aenter__()

    async def _worker(self, name, card):
        worker = FakeWorker(f"{self._folder}/{name}.sock", arena=self.arena, card=card, memory=self.memory)
        await worker.start()
        return worker

    async def close(self):
        await self.parts.__aexit__()
        for worker in [*self.workers, *self.encoders]:
            await worker.close()
            worker.engine.recover()  # its error's traceback references views of the arena

    @property
    def encoder(self):
        return self.encoders[0].engine

    @property
    def worker(self):
        return self.workers[0].engine

    def outcomes(self):
        names = ("encoded", "unkept", "late", "failed", "worker")
        counts = {name: self.parts.count("medialane_encoder_requests_total", outcome=name) for name in names}
        return {name: int(count) for name, count in counts.items() if count}

    async def answer(self, *datas, request_id="r", **params):
        with open_scope() as scope:
            self.timeline = scope.timeline
            return await self.parts.answer(prompt(*datas), request_id, **params)


@pytest.fixture
async def host(arena, preparers):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        host = Host(arena, preparers, folder)
        yield host
        await host.close()
    gc.collect()


async def test_new_image_is_encoded_by_the_encoder_and_loaded_by_the_worker(host):
    await host.start()
    tokens = await host.answer(png())
    assert (host.encoder.num_encoded, host.worker.num_encoded, host.worker.num_loaded) == (1, 0, 1)
    assert host.outcomes() == {"encoded": 1}
    assert host.timeline.durations()["encode"] > 0
    # Known when it was routed, and sent instead of the tensors.
    assert host.parts.count("medialane_embedding_loaded_bytes_total") > 0
    assert tokens == await host.answer(png())  # now known: no encoder is asked
    assert host.encoder.num_requests == 1
    assert host.worker.num_loaded == 2


async def test_encoder_gets_the_placeholder_and_the_token_after_it(host):
    """Without that token, engines of some models end."""
    await host.start()
    sent, generate = [], host.encoder.generate
    host.encoder.generate = lambda request, *args: sent.append(request.prompt) or generate(request, *args)
    await host.answer(png(seed=0), png(seed=1))
    after = [prompt.token_ids[prompt.features[0].placeholder.length :] for prompt in sent]
    assert sorted(after) == [[], [2]], "the second one ends the prompt"


async def test_encoding_is_a_step_of_its_item_and_encoders_get_the_context_of_the_request(host):
    await host.start()
    contexts, generate = [], host.encoder.generate
    host.encoder.generate = lambda sent, *args: contexts.append(sent.trace_headers) or generate(sent, *args)
    media = prompt(png())
    with http_collector() as collector, open_scope() as scope:
        environ = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        tracing = RequestTracing(collector.endpoint, environ, model="m")
        asked = {"method": "POST", "path": "/v1/chat/completions", "headers": []}
        scope.trace = tracing.begin(asked, scope.record)
        scope.record.received(media.items, model="m", streams=False)
        await host.parts.answer(media)
        scope.record.ended(is_disconnected=False)
        scope.trace.end()
        await tracing.close()
    (root,), (item,) = collector.named("chat m"), collector.named("medialane.item")
    assert collector.children(item)[-1].name == "medialane.encode"
    assert item.attributes["medialane.item.embedding"] == "loaded"
    assert [context["traceparent"][3:52] for context in contexts] == [f"{root.trace_id}-{root.span_id}"]


async def test_answer_is_that_of_a_worker_that_encodes_itself(host):
    await host.start(encode_at="workers")
    expected = await host.answer(png())
    assert (host.worker.num_encoded, host.encoder.num_requests) == (1, 0)
    await host.close()
    await host.start(encode_at="encoders")
    assert await host.answer(png(seed=0), png(seed=1), png(seed=0))
    assert await host.answer(png()) == expected


async def test_url_is_fetched_once_for_encoder_and_worker(host):
    await host.start()
    url = "http://pictures.example/a.png"
    host.parts.fetcher.contents[url] = png()
    media = MediaPrompt([1, PLACEHOLDER_TOKEN], (MediaRef("image", "messages[0].content[0]", url=url),))
    with open_scope():
        assert await host.parts.answer(media)
    assert host.parts.fetcher.num_fetches == 1
    assert (host.encoder.num_encoded, host.worker.num_encoded) == (1, 0)
    assert host.parts.count("medialane_embedding_loaded_bytes_total") > 0


async def test_items_of_a_prompt_are_encoded_side_by_side_and_each_once(host):
    await host.start(encoders=2)
    for encoder in host.encoders:
        encoder.engine.encode_s = 1
    answering = asyncio.create_task(host.answer(png(seed=0), png(seed=1), png(seed=0)))
    await eventually(lambda: [encoder.engine.num_reading for encoder in host.encoders] == [1, 1])
    await answering
    assert [encoder.engine.num_encoded for encoder in host.encoders] == [1, 1]
    assert host.worker.num_encoded == 0
    assert host.timeline.durations()["encode"] >= 1


async def test_only_the_unknown_image_of_two_is_encoded(host):
    await host.start()
    await host.answer(png(seed=0))
    await host.answer(png(seed=0), png(seed=1))
    assert host.encoder.num_encoded == 2
    assert host.worker.num_encoded == 0


async def test_requests_with_the_same_new_image_wait_for_one_encode_request(host):
    await host.start(workers=2)
    host.encoder.encode_s = 0.1
    answers = await asyncio.gather(*(host.answer(png(), request_id=f"r{n}") for n in range(4)))
    assert len(set(map(tuple, answers))) == 1
    assert (host.encoder.num_requests, host.encoder.num_encoded) == (1, 1)
    assert [worker.engine.num_encoded for worker in host.workers] == [0, 0]


async def test_image_in_a_workers_cache_is_not_encoded_again(host):
    await host.start(encode_at="encoders")
    host.encoders[0].engine.die(GenerationFailed("no memory"))
    await host.answer(png())
    assert host.outcomes() == {"failed": 1}
    await host.answer(png())
    assert host.outcomes() == {"failed": 1}


@pytest.mark.parametrize("error", [GenerationFailed, WorkerLost, NoWorkerReady, InvalidFeature, HandoverFailed])
async def test_encoder_that_fails_leaves_the_item_to_the_worker(host, error):
    await host.start()
    host.encoder.die(error("no memory"))
    assert await host.answer(png())
    assert (host.worker.num_encoded, host.outcomes()) == (1, {"failed": 1})


async def test_encoder_that_is_lost_while_it_encodes_leaves_the_item_to_the_worker(host):
    await host.start()
    host.encoder.encode_s = 30
    answering = asyncio.create_task(host.answer(png()))
    await eventually(lambda: host.encoder.num_reading == 1)
    await host.encoders[0].close()
    assert await answering
    assert (host.worker.num_encoded, host.outcomes()) == (1, {"failed": 1})
    await host.answer(png(seed=1))  # none is left to be asked
    assert host.outcomes() == {"failed": 1}


async def test_late_encoder_gets_no_more_items_until_it_has_released_the_late_one(host):
    await host.start(timeout_s=0.1)
    host.encoder.encode_s, host.encoder.release_s = 30, 2
    assert await host.answer(png())
    assert (host.worker.num_encoded, host.outcomes()) == (1, {"late": 1})
    await host.answer(png(seed=1))
    assert host.outcomes() == {"late": 1}
    host.encoder.encode_s = 0
    await eventually(lambda: host.encoder.num_reading == 0)
    await eventually(lambda: not host.parts.links.of_role("encoder")[0].client.requests)
    await host.answer(png(seed=2))
    assert host.outcomes() == {"late": 1, "encoded": 1}


async def test_encoder_that_returns_is_used_again(host):
    await host.start()
    await host.encoders[0].close()
    link = host.parts.links.of_role("encoder")[0]
    await eventually(lambda: link.client is None)
    await host.answer(png())
    await host.encoders[0].start()
    await eventually(lambda: link.same_host)
    await host.answer(png(seed=1))
    assert (host.encoder.num_encoded, host.outcomes()) == (1, {"encoded": 1})


async def test_cancelled_client_aborts_the_encode_request(host):
    await host.start()
    host.encoder.encode_s = 30
    answering = asyncio.create_task(host.answer(png()))
    await eventually(lambda: host.encoder.num_reading == 1)
    answering.cancel()
    await asyncio.wait([answering])
    await eventually(lambda: host.encoder.num_reading == 0)
    assert host.worker.num_requests == 0


async def test_cancelled_client_does_not_end_the_encode_request_of_another(host):
    await host.start()
    host.encoder.encode_s = 0.3
    first = asyncio.create_task(host.answer(png()))
    await eventually(lambda: host.encoder.num_reading == 1)
    first_timeline = host.timeline
    second = asyncio.create_task(host.answer(png(), request_id="second"))
    await eventually(lambda: host.timeline is not first_timeline and host.timeline.current == "encode")
    await iterations(2)  # until it waits for the encoder, too
    first.cancel()
    assert await second
    assert (host.encoder.num_requests, host.encoder.num_encoded, host.worker.num_encoded) == (1, 1, 0)


async def test_burst_while_encoders_are_killed_ends_each_request_once(host):
    await host.start(workers=2, encoders=2, timeout_s=1.0)
    for encoder in host.encoders:
        encoder.engine.encode_s = 0.05
    datas = [png(seed=seed) for seed in range(10)]
    answering = [asyncio.create_task(host.answer(datas[n % 10], request_id=f"r{n}")) for n in range(30)]
    await eventually(lambda: host.encoder.num_reading > 0)
    await host.encoders[0].close()
    await host.encoders[1].close()
    answers = await asyncio.gather(*answering)
    assert all(len(tokens) == 4 for tokens in answers)
    assert all(answers[n] == answers[n % 10] for n in range(30))
    assert sum(worker.engine.num_requests for worker in host.workers) == 30


async def test_auto_uses_the_encoder_only_while_workers_are_busy(host):
    await host.start(encode_at="auto")
    await host.answer(png(600, 400, seed=0))
    assert (host.worker.num_encoded, host.outcomes()) == (1, {"worker": 1})
    with open_scope():
        texts = [host.parts.generate(request(f"t{n}", [1, 2, 3], token_s=0.3), None) for n in range(8)]
        running = [asyncio.create_task(text) for text in texts]
        await eventually(lambda: host.worker.num_reading == 8)
        await host.answer(png(600, 400, seed=1), max_tokens=1)
        await asyncio.gather(*running)
    assert (host.encoder.num_encoded, host.outcomes()) == (1, {"worker": 1, "encoded": 1})


async def test_encoder_with_another_digest_is_not_used(host):
    other = msgspec.structs.replace(CARD.encoder, digest="f" * 64)
    await host.start(card=msgspec.structs.replace(CARD, encoder=other))
    await host.answer(png())
    assert (host.encoder.num_requests, host.worker.num_encoded) == (0, 1)


async def test_encoders_never_get_requests_of_clients(host):
    await host.start()
    await host.workers[0].close()
    await eventually(lambda: host.parts.links.num_ready == 0)
    with open_scope(), pytest.raises(NoWorkerReady):
        await host.parts.generate(request("text", [1, 2, 3]), None)
    assert host.encoder.num_requests == 0


async def test_embedding_that_finds_no_memory_leaves_the_item_to_the_worker(host):
    await host.start()
    host.encoders[0].host_arena.has_memory = False
    assert await host.answer(png())
    assert (host.encoder.num_encoded, host.worker.num_encoded, host.outcomes()) == (1, 1, {"unkept": 1})
