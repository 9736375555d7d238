"""From a prompt with media to an engine's output: gateway and worker over a real socket, arena and preparers."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import tempfile
from contextlib import aclosing

import msgspec
import numpy as np
import pytest
from gateway_parts import FakeWorker, Parts, png, prompt, ref, request
from msgspec.structs import replace
from PIL import Image as PILImage

from audio_maker import by_libsndfile, tones
from medialane.gateway import GatewayConfig, HandoverConfig, InlineTransport, open_scope
from medialane.gateway.intake import ExtractedMedia
from medialane.gateway.records import request_report
from medialane.testing.fake_processor import PLACEHOLDER_TOKEN, FakeAssembler
from medialane.types.errors import (
    ArenaFull,
    FeatureUnsupported,
    GenerationFailed,
    HandoverFailed,
    InvalidFeature,
    InvalidImage,
    InvalidRequest,
    MediaOverloaded,
    MediaTooLarge,
    NoWorkerReady,
    PreparerCrashed,
    PromptTooLong,
    StoreUnavailable,
    WorkerLost,
)
from medialane.types.feature import MediaPrompt
from medialane.types.hashing import content_hash
from medialane.types.media import STAGES, Alias, MediaRef, MediaSize
from medialane.types.request import ExpandedPrompt, ModelCard, UnexpandedPrompt
from medialane.types.tensor import InlineTensor
from medialane.worker.media import Receiver
from waiting import eventually, iterations

FAST = {"reconnect_initial_s": 0.01, "reconnect_max_s": 0.05}


@pytest.fixture
async def make_worker(arena):
    """Workers whose requests are recorded in `seen`; closed at the end."""
    workers = []
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:

        async def make(**engine):
            worker = FakeWorker(f"{folder}/{len(workers)}.sock", arena=arena, **engine)
            workers.append(worker)
            await worker.start()
            return worker

        yield make
        for worker in workers:
            await worker.close()
    gc.collect()  # a cancelled request's traceback references frames, which reference views of the arena


@pytest.fixture
async def worker(make_worker):
    return await make_worker()


def spy(worker, errors=()):
    """The requests that reach the engine; the first of them fail with `errors`."""
    seen, errors, generate = [], list(errors), worker.engine.generate

    async def spied(request, *given):
        seen.append(request)
        if errors:
            raise errors.pop(0)
        async with aclosing(generate(request, *given)) as deltas:
            async for delta in deltas:
                yield delta

    worker.engine.generate = spied
    return seen


async def test_features_arrive_in_prompt_order_and_repeats_hit_the_cache(arena, preparers, worker):
    images = [png(300, 200, 1), png(30, 30, 2), png(90, 60, 3)]
    seen = spy(worker)
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope() as first:
            tokens = await parts.answer(prompt(*images))
        with open_scope() as second:
            assert await parts.answer(prompt(*images)) == tokens
        assert (first.timeline.cache, second.timeline.cache) == ("miss", "hit")
        assert second.timeline.copied_bytes == 0
        assert {"fetch", "decode", "process", "assemble", "route", "handover", "first_token"} <= set(
            first.timeline.seconds
        )
        assert preparers.stats().num_done == 3
    features = seen[0].prompt.features
    assert [(f.size.width, f.size.height) for f in features] == [(300, 200), (30, 30), (90, 60)]
    assert [f.placeholder.offset for f in features] == sorted(f.placeholder.offset for f in features)
    assert [f.mm_hash for f in features] == [f.mm_hash for f in seen[1].prompt.features]


@pytest.mark.parametrize("streams", [True, False])
async def test_first_token_is_when_the_worker_has_it_whether_or_not_the_answer_is_streamed(
    arena, preparers, worker, streams
):
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope() as scope:
            await parts.answer(prompt(), max_tokens=20, token_s=0.05, streams=streams)
    timeline, record = scope.timeline, scope.record
    assert record.total_ms > 1000
    assert 50 <= timeline.seconds["first_token"] * 1000 < record.total_ms - 900  # the other tokens take 0.95 s
    assert record.first_token_ms == pytest.approx(timeline.seconds["first_token"] * 1000)
    assert timeline.seconds["first_token"] * 1000 <= record.ttft_ms < record.total_ms - 900


async def test_first_token_of_several_prompts_is_the_earliest_whichever_is_complete_first(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope() as scope:
            long = asyncio.create_task(parts.answer(prompt(), "a", max_tokens=30, token_s=0.1, streams=False))
            await eventually(lambda: worker.engine.num_requests == 1)
            await asyncio.sleep(0.2)  # time: the first prompt has its first token
            await parts.answer(prompt(), "b", max_tokens=2, token_s=0.25, streams=False)
            assert not long.done()
            after_s = scope.record.first_token_ms / 1000
            await long
    assert after_s >= 0.25
    assert scope.timeline.seconds["first_token"] < after_s
    assert scope.record.first_token_ms < after_s * 1000


async def test_features_that_the_worker_refuses_are_processed_there(arena, preparers, worker):
    seen = spy(worker, [InvalidFeature("image: a field that no sample had")])
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope():
            assert await parts.answer(prompt(png()))
    assert isinstance(seen[0].prompt, ExpandedPrompt)
    assert seen[1].prompt.stage == "url"


async def test_prompt_that_cannot_be_expanded_here_is_by_the_worker(arena, preparers, worker, caplog):
    class Refusing(FakeAssembler):
        def assemble(self, *_):
            raise FeatureUnsupported("the prompt depends on pixels")

    seen = spy(worker)
    async with Parts(arena, preparers, [worker], assembler=Refusing()) as parts:
        with open_scope():
            assert await parts.answer(prompt(png()))
    assert seen[0].prompt.stage == "decoded"
    assert "stage decoded, not features: the prompt depends on pixels" in caplog.text


@pytest.mark.parametrize("instead", ["decoded", "url"])
async def test_stage_of_a_request_is_that_of_its_modalities(arena, preparers, worker, instead):
    """Of the model's audio no features are made: images are sent as features, except with audio."""

    class WithoutAudio(FakeAssembler):
        unfit_stages = {"audio": instead}  # noqa: RUF012 - constant

    seen = spy(worker)
    image, audio = (
        ref(png()),
        MediaRef("audio", "messages[0].content[1].audio_url", data=by_libsndfile(tones(8000), 8000)),
    )
    async with Parts(arena, preparers, [worker], assembler=WithoutAudio()) as parts:
        for items in ((image,), (audio,), (image, audio)):
            token_ids = [1, *[2, PLACEHOLDER_TOKEN] * len(items)]
            with open_scope():
                assert await parts.answer(MediaPrompt(token_ids, items))
    assert isinstance(seen[0].prompt, ExpandedPrompt)
    assert [found.prompt.stage for found in seen[1:]] == [instead, instead]
    assert [item.modality for item in seen[2].prompt.media] == ["image", "audio"]


async def test_concurrent_requests_prepare_one_image_once(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:

        async def one(number):
            with open_scope():
                return await parts.answer(prompt(png(), options=b'{"sleep_s": 0.1}'), f"r{number}")

        answers = await asyncio.gather(*[one(n) for n in range(4)])
        assert len({tuple(answer) for answer in answers}) == 1
        assert preparers.stats().num_done == 1


async def test_image_twice_in_a_request_is_one_entry_with_two_placeholders(arena, preparers, worker):
    seen = spy(worker)
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope():
            await parts.answer(prompt(png(), png()))
        assert arena.stats().num_entries == 2  # the encoded bytes and the feature
    first, second = seen[0].prompt.features
    assert first.mm_hash == second.mm_hash
    assert first.placeholder.offset != second.placeholder.offset


async def test_tenants_and_options_do_not_share_features_and_the_worker_knows_the_options(arena, preparers, worker):
    seen = spy(worker)
    async with Parts(arena, preparers, [worker]) as parts:
        for media in (prompt(png()), prompt(png(), salt="tenant"), prompt(png(), options=b'{"scale":2}')):
            with open_scope() as scope:
                await parts.answer(media)
            assert scope.timeline.cache == "miss"
    assert [r.prompt.options for r in seen] == [b"{}", b"{}", b'{"scale":2}']


async def test_scope_and_worker_holds_end_with_the_output(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope():
            await parts.answer(prompt(png(), png(seed=1)))
        await eventually(lambda: parts.num_held == 0)
        assert arena.stats().num_leases == 0
        assert arena.stats().num_entries == 4  # cached: each as it was sent, and its feature


async def test_worker_keeps_its_lease_until_the_engine_has_released(arena, preparers, make_worker):
    worker = await make_worker(release_s=0.2)
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope():
            prepared = await parts.gateway.prepare(prompt(png()))
            wanted = request("r", prepared.token_ids, max_tokens=1000, token_s=0.01)
            async with aclosing(parts.gateway.generate(wanted, prepared)) as deltas:
                await anext(deltas)
        await eventually(lambda: parts.num_held == 1)  # the scope's has ended, the worker's has not
        assert worker.engine.num_reading == 1
        await eventually(lambda: parts.num_held == 0)
        assert worker.engine.num_reading == 0
        assert arena.stats().num_leases == 0


async def test_unclosed_output_is_aborted_by_its_scope(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope():
            prepared = await parts.gateway.prepare(prompt(png()))
            deltas = parts.gateway.generate(request("r", prepared.token_ids, max_tokens=1000, token_s=0.01), prepared)
            await anext(deltas)
        await eventually(lambda: parts.num_held == 0)
        assert worker.engine.num_reading == 0
        with pytest.raises(GenerationFailed):
            await anext(deltas)


async def test_gateway_knows_whether_the_next_output_has_arrived(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope():
            assert not parts.gateway.has_next()
            deltas = parts.gateway.generate(request("r", [1, 2, 3], max_tokens=3, token_s=0.01), None)
            async with aclosing(deltas):
                await anext(deltas)
                await eventually(parts.gateway.has_next)
                assert [len(delta.completions[0].token_ids) async for delta in deltas] == [1, 1]
            assert not parts.gateway.has_next()


async def test_client_disconnect_while_waiting_aborts_at_the_worker(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:

        async def one():
            with open_scope():
                await parts.answer(prompt(png()), max_tokens=1000, token_s=0.01)

        client = asyncio.create_task(one())
        await eventually(lambda: worker.engine.num_reading == 1)
        client.cancel()
        await asyncio.wait([client])
        assert client.cancelled()
        await eventually(lambda: worker.engine.num_reading == 0 and parts.num_held == 0)


@pytest.mark.parametrize("stage", ["features", "decoded", "url"])
async def test_client_disconnect_at_any_await_leaves_no_hold_or_request(arena, preparers, worker, stage):
    """Cancelled after every number of loop iterations, from new media to completion."""
    async with Parts(arena, preparers, [worker], config=GatewayConfig(stage=stage, **FAST)) as parts:

        async def one():
            with open_scope():
                return await parts.answer(prompt(png(), png(seed=1)), max_tokens=1)

        for num_iterations in range(100):
            client = asyncio.create_task(one())
            await iterations(num_iterations)
            client.cancel()
            await asyncio.wait([client])
            if not client.cancelled():
                break
            await eventually(lambda: worker.engine.num_reading == parts.num_held == 0)
            await eventually(lambda: arena.stats().num_leases == 0)
        assert num_iterations > 1


async def test_media_stay_with_the_prepared_prompt(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope():
            prepared = await parts.gateway.prepare(prompt(png()))
            with open_scope():  # as another task of the app may be in
                assert await parts.generate(request("r", prepared.token_ids), prepared)


async def test_fallback_media_are_found_once_for_all_beams(arena, preparers, make_worker):
    card = ModelCard("fake", 8192, 16, processor={"model": "other"})
    worker = await make_worker(card=card)
    seen = spy(worker)
    url = "http://host/a.png"
    async with Parts(arena, preparers, [worker]) as parts:
        parts.fetcher.contents[url] = png()
        with open_scope():
            item = MediaRef("image", "messages[0].content[0].image_url", url=url)
            prepared = await parts.gateway.prepare(MediaPrompt([1, 7], (item,)))
            for beam in range(3):
                await parts.generate(request(f"r{beam}", [*prepared.token_ids, beam]), prepared)
        assert parts.fetcher.num_fetches == 2
    assert [(r.prompt.stage, r.prompt.token_ids) for r in seen] == [("decoded", [1, 7, beam]) for beam in range(3)]


async def test_bookkeeping_failure_after_sending_aborts_the_request(arena, preparers, worker, monkeypatch):
    async with Parts(arena, preparers, [worker]) as parts:

        def broken(*_, **__):
            raise RuntimeError("the router is broken")

        monkeypatch.setattr(parts.gateway.routes, "begin", broken)
        with open_scope():
            prepared = await parts.gateway.prepare(prompt(png()))
            wanted = request("r", prepared.token_ids, max_tokens=1000, token_s=0.05)
            with pytest.raises(RuntimeError, match="broken"):
                await parts.generate(wanted, prepared)
        await eventually(lambda: parts.num_held == 0, timeout_s=2)


async def test_client_disconnect_during_preparation_leaves_no_pin(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:

        async def one():
            with open_scope():
                await parts.gateway.prepare(prompt(png(), png(seed=1), options=b'{"sleep_s": 0.1}'))

        client = asyncio.create_task(one())
        await eventually(lambda: preparers.stats().num_busy == 2)
        client.cancel()
        await asyncio.wait([client])
        await eventually(lambda: preparers.stats().num_busy == 0)
        await eventually(lambda: arena.stats().num_leases == 0)


async def test_items_of_a_rejected_request_free_their_preparers(arena, preparers, worker):
    """One item is rejected; the request's other items, running or queued, are no longer needed."""
    async with Parts(arena, preparers, [worker]) as parts:
        several = prompt(png()[:60], *(png(seed=n) for n in range(3)), options=b'{"sleep_s": 30}')
        with open_scope(), pytest.raises(InvalidImage):
            await parts.gateway.prepare(several)
        await eventually(lambda: preparers.stats().num_busy == preparers.stats().num_queued == 0)
        with open_scope():
            assert await parts.answer(prompt(png(seed=5)))


async def test_preparation_continues_for_a_remaining_request(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:

        async def one():
            with open_scope():
                return await parts.answer(prompt(png(), options=b'{"sleep_s": 0.6}'))

        def num_waiting():
            flights = parts.store.items._preparing._flights  # nobody else sees when the store has the second call
            return [flight.num_waiters for flight in flights.values()]

        leaving, staying = asyncio.create_task(one()), asyncio.create_task(one())
        await eventually(lambda: preparers.stats().num_busy == 1 and num_waiting() == [2])
        leaving.cancel()
        assert await staying
        assert preparers.stats().num_restarts == 0


async def test_dead_worker_fails_its_requests_and_releases_its_leases(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope() as scope:
            prepared = await parts.gateway.prepare(prompt(png()))
            wanted = request("r", prepared.token_ids, max_tokens=1000, token_s=0.01)
            deltas = parts.gateway.generate(wanted, prepared)
            await anext(deltas)
            await worker.close()
            with pytest.raises(WorkerLost):
                async for _ in deltas:
                    pass
            assert scope.error_code == "worker_lost"
        await eventually(lambda: parts.num_held == 0)
        with open_scope(), pytest.raises(NoWorkerReady) as refused:
            await parts.answer(prompt(png()))
        assert refused.value.retry_after_s
        await worker.start()
        await eventually(lambda: parts.links.num_ready == 1)
        with open_scope():
            assert await parts.answer(prompt(png()))


async def test_worker_holds_media_of_a_lost_connection_until_the_engine_has_released(arena, preparers, make_worker):
    worker = await make_worker(release_s=0.3)
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope():
            prepared = await parts.gateway.prepare(prompt(png()))
            deltas = parts.gateway.generate(request("r", prepared.token_ids, max_tokens=1000, token_s=0.01), prepared)
            await anext(deltas)
            worker.drop_connections()
            with pytest.raises(WorkerLost):
                async for _ in deltas:
                    pass
        await eventually(lambda: parts.num_held == 1)
        assert worker.engine.num_reading == 1
        await eventually(lambda: parts.num_held == 0)
        assert worker.engine.num_reading == 0
        await eventually(lambda: parts.links.num_ready == 1)


async def test_closing_the_links_closes_the_connections(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        (link,) = parts.links.links.values()
        client = link.client
    assert client.closed.is_set()
    assert link.client is None


async def test_unserialisable_request_leaves_no_pin(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope():
            prepared = await parts.gateway.prepare(prompt(png()))
            wanted = request("r", prepared.token_ids)
            with pytest.raises(OverflowError):
                await parts.generate(msgspec.structs.replace(wanted, priority=1 << 70), prepared)
        await eventually(lambda: parts.num_held == 0)


async def test_failed_hand_over_falls_back_to_the_next_transfer_path(arena, preparers, worker):
    seen = spy(worker, [HandoverFailed("the tensors are gone"), HandoverFailed("again")])
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope() as scope:
            assert await parts.answer(prompt(png()))
        assert scope.error_code is None
        for way in ("features/shm", "features/inline"):
            assert parts.count("medialane_transfer_fallbacks_total", path=way, reason="handover_failed") == 1
        await eventually(lambda: parts.num_held == 0)
    kinds = [type(r.prompt) for r in seen]
    assert kinds == [ExpandedPrompt, ExpandedPrompt, UnexpandedPrompt]
    assert bytes_of(arena, seen[2].prompt) == png()
    assert len({r.request_id for r in seen}) == 3


async def test_invalid_request_is_a_client_error_without_fallback(arena, preparers, worker):
    seen = spy(worker, [InvalidFeature("image pixel_values: shape (60000, 6) instead of (None, 1176)")])
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope() as scope, pytest.raises(InvalidRequest, match="pixel_values") as refused:
            await parts.answer(prompt(png(), options=b'{"scale":2}'))
        assert (refused.value.status, refused.value.code) == (400, "invalid_feature")
        assert scope.error_code == "invalid_feature"
        await eventually(lambda: parts.num_held == 0)
    assert len(seen) == 1


async def test_failure_of_the_last_transfer_path_fails_the_generation(arena, preparers, worker):
    spy(worker, [HandoverFailed("/dev/shm/medialane-secret")] * 4)
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope() as scope, pytest.raises(GenerationFailed) as failed:
            await parts.answer(prompt(png()))
        assert "secret" not in failed.value.message
        assert scope.error_code == "generation_failed"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("transport", "is_noticed"), [("shm", False), ("shm", True), ("inline", True)])
async def test_media_lost_with_their_store_are_unavailable(arena, preparers, worker, stage, transport, is_noticed):
    """With one hand-over path only; otherwise the next stage finds them at the next store."""
    config, handover = GatewayConfig(stage=stage, **FAST), HandoverConfig(transport=transport)
    async with Parts(arena, preparers, [worker], config=config, handover=handover) as parts:
        with open_scope() as scope:
            prepared = await parts.gateway.prepare(prompt(png()))
            await parts.store.server.close()
            if is_noticed:
                arena.close()
                await eventually(lambda: parts.store.link.arena is None)
            with pytest.raises(StoreUnavailable) as lost:
                await parts.generate(request("r", prepared.token_ids), prepared)
            assert lost.value.retry_after_s is not None
            assert scope.error_code == "media_store_unavailable"


async def test_hand_over_failing_after_the_first_token_is_not_retried(arena, preparers, worker):
    generate = worker.engine.generate
    num_calls = 0

    async def failing(request, *given):
        nonlocal num_calls
        num_calls += 1
        async with aclosing(generate(request, *given)) as deltas:
            yield await anext(deltas)
        raise HandoverFailed("too late")

    worker.engine.generate = failing
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope(), pytest.raises(GenerationFailed):
            await parts.answer(prompt(png()))
    assert num_calls == 1


async def test_worker_without_shared_memory_gets_the_bytes(arena, preparers, make_worker):
    worker = await make_worker(attaches=False)
    seen = spy(worker)
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope() as scope:
            await parts.answer(prompt(png()))
            assert arena.stats().num_leases == 1  # the scope's own
        assert scope.timeline.copied_bytes > sum(len(t.data) for t in seen[0].prompt.features[0].tensors)


async def test_worker_with_a_different_processor_processes_media_itself(arena, preparers, make_worker):
    card = ModelCard("fake", 8192, 16, processor={"model": "other"})
    worker = await make_worker(card=card)
    seen = spy(worker)
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope():
            await parts.answer(prompt(png()))
    assert isinstance(seen[0].prompt, UnexpandedPrompt)


async def test_no_allowed_transfer_path_is_a_clear_error(arena, preparers, make_worker):
    worker = await make_worker(attaches=False)
    config = GatewayConfig(stage="features", **FAST)
    async with Parts(arena, preparers, [worker], config=config, handover=HandoverConfig(transport="shm")) as parts:
        with open_scope(), pytest.raises(NoWorkerReady, match="--transport"):
            await parts.answer(prompt(png()))


class InvertedTransport(InlineTransport):
    """Sends every byte inverted; for workers with a store."""

    name = "inverted"
    choices = ()

    def reaches(self, worker):
        return worker.same_host

    async def publish(self, payloads, timeline):
        if self.fails:
            raise HandoverFailed("no")
        sent = await super().publish(payloads, timeline)
        return [replace(item, tensors=tuple(map(inverted, item.tensors))) for item in sent]


def inverted(tensor):
    return InlineTensor(tensor.spec, memoryview(bytes(~np.frombuffer(tensor.data, np.uint8))))


@pytest.mark.parametrize("fails", [False, True])
async def test_new_transport_is_its_two_ends(arena, preparers, worker, monkeypatch, fails):
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope():
            expected = await parts.answer(prompt(png()))
    fetch = Receiver.fetch
    monkeypatch.setattr(
        Receiver, "fetch", lambda self, t: fetch(self, inverted(t) if isinstance(t, InlineTensor) else t)
    )
    transport = InvertedTransport(arena.view.tensor, 1 << 20)
    transport.fails = fails
    async with Parts(arena, preparers, [worker], transports=[transport]) as parts:
        with open_scope() as scope:
            scope.extracted = ExtractedMedia(prompt(png()).items, wants_report=True)
            assert await parts.answer(prompt(png())) == expected
            assert json.loads(request_report(scope.record))["transport"] == ("shm" if fails else "inverted")
        failures = parts.count("medialane_transfer_fallbacks_total", path="features/inverted", reason="handover_failed")
        assert failures == fails


async def test_features_too_large_for_a_message_fall_back_to_the_encoded_image(arena, preparers, make_worker):
    worker = await make_worker(attaches=False)
    seen = spy(worker)
    limit = len(png()) + 1  # the features are float32
    async with Parts(arena, preparers, [worker], handover=HandoverConfig(max_inline_bytes=limit)) as parts:
        with open_scope():
            await parts.answer(prompt(png()))
        with open_scope(), pytest.raises(GenerationFailed):
            await parts.answer(prompt(png(), png()))
    assert [type(r.prompt) for r in seen] == [UnexpandedPrompt]


async def test_truncated_prompt_is_never_processed_by_the_worker(arena, preparers, worker):
    seen = spy(worker, [HandoverFailed("no")] * 2)
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope():
            prepared = await parts.gateway.prepare(prompt(png()))
            with pytest.raises(GenerationFailed):
                await parts.generate(request("r", prepared.token_ids[1:]), prepared)
    assert all(isinstance(r.prompt, ExpandedPrompt) for r in seen)


async def test_url_stage_sends_the_fetched_bytes_without_preparing(arena, preparers, worker):
    seen = spy(worker)
    async with Parts(arena, preparers, [worker], config=GatewayConfig(stage="url", **FAST)) as parts:
        parts.fetcher.contents["http://host/a.png"] = png()
        item = MediaRef("image", "messages[0].content[0].image_url", url="http://host/a.png")
        with open_scope():
            await parts.answer(MediaPrompt([1, 7], (item,)))
        assert parts.fetcher.num_fetches == 1
        assert preparers.stats().num_done == 0
    assert (seen[0].prompt.stage, bytes_of(arena, seen[0].prompt)) == ("url", png())


def bytes_of(arena, prompt):
    """The only transferred tensor of the prompt's only item."""
    ((tensor,),) = [item.tensors for item in prompt.media]
    return bytes(tensor.data if isinstance(tensor, InlineTensor) else arena.view.tensor(tensor))


@pytest.mark.parametrize("transport", ["shm", "inline"])
async def test_decoded_stage_sends_pixels_under_the_feature_key(arena, preparers, worker, transport):
    seen = spy(worker)
    settings = {"config": GatewayConfig(stage="decoded", **FAST), "handover": HandoverConfig(transport=transport)}
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope():
            expected = await parts.gateway.prepare(prompt(png()))
    async with Parts(arena, preparers, [worker], **settings) as parts:
        for num_hits in (0, 1):
            with open_scope() as scope:
                await parts.answer(prompt(png()))
                assert scope.timeline.num_hits == num_hits
        await eventually(lambda: arena.stats().num_leases == 0)
    (item,) = seen[0].prompt.media
    assert (seen[0].prompt.stage, item.mm_hash, item.size) == ("decoded", expected.mm_hashes[0], MediaSize(60, 40))
    assert bytes_of(arena, seen[0].prompt) == np.asarray(PILImage.open(io.BytesIO(png()))).tobytes()


async def test_changed_content_of_a_url_never_has_the_old_hash(arena, preparers, worker):
    url, old, new = "http://host/a.png", png(seed=1), png(seed=2)
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope():
            expected = [await parts.answer(prompt(old), "a"), await parts.answer(prompt(new), "b")]
        await eventually(lambda: parts.num_held == 0)
        arena.clear()
        parts.fetcher.contents[url] = new
        parts.fetcher.fresh[url] = content_hash(old)  # as its cache headers promised
        item = MediaRef("image", "messages[0].content[0].image_url", url=url)
        with open_scope():
            assert await parts.answer(MediaPrompt([1, 2, 7], (item,)), "c") == expected[1]
        with open_scope():
            assert await parts.answer(prompt(old), "d") == expected[0]


async def test_content_changed_before_sending_uses_its_new_hash(arena, preparers, worker):
    seen = spy(worker, [HandoverFailed("no")] * 2)
    url = "http://host/a.png"
    async with Parts(arena, preparers, [worker]) as parts:
        parts.fetcher.contents[url] = png(seed=1)
        item = MediaRef("image", "messages[0].content[0].image_url", url=url)
        with open_scope():
            prepared = await parts.gateway.prepare(MediaPrompt([1, 7], (item,)))
            parts.fetcher.contents[url] = png(seed=2)
            await parts.generate(request("r", prepared.token_ids), prepared)
    assert bytes_of(arena, seen[2].prompt) == png(seed=2)
    assert seen[2].prompt.media[0].mm_hash != prepared.mm_hashes[0]


async def test_items_for_worker_side_processing_are_found_concurrently(arena, preparers, worker):
    seen = spy(worker, [HandoverFailed("no")] * 2)
    images = {f"http://host/{n}.png": png(seed=n) for n in range(3)}
    async with Parts(arena, preparers, [worker]) as parts:
        parts.fetcher.contents.update(images)
        items = tuple(MediaRef("image", f"messages[0].content[{n}].image_url", url=u) for n, u in enumerate(images))
        with open_scope():
            prepared = await parts.gateway.prepare(MediaPrompt([1, 7, 7, 7], items))
            all_there = asyncio.Barrier(3)  # a fetch that waits for the others ends only if they have begun
            fetch = parts.fetcher.fetch

            async def together(*args, **kwargs):
                async with asyncio.timeout(5):
                    await all_there.wait()
                return await fetch(*args, **kwargs)

            parts.fetcher.fetch = together
            await parts.generate(request("r", prepared.token_ids), prepared)
        await eventually(lambda: arena.stats().num_leases == 0)
    assert seen[2].prompt.stage == "url"
    assert [item.param for item in seen[2].prompt.media] == [item.param for item in items]
    assert [bytes(arena.view.tensor(item.tensors[0])) for item in seen[2].prompt.media] == list(images.values())


async def test_one_invalid_image_of_three_fails_the_request_naming_its_field(arena, preparers, worker):
    seen = spy(worker)
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope(), pytest.raises(InvalidRequest) as failed:
            await parts.answer(prompt(png(seed=1), b"not an image at all", png(seed=2)))
        assert failed.value.param == "messages[0].content[1].image_url"
        await eventually(lambda: preparers.stats().num_busy == 0)
        await eventually(lambda: arena.stats().num_leases == 0)
        with open_scope():
            assert await parts.answer(prompt(png(seed=1)))
    assert len(seen) == 1


async def test_processor_error_reaches_every_waiter_with_its_own_field(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        refused = prompt(png(), options=b'{"fault": "reject", "sleep_s": 0.05}')
        other = MediaPrompt(refused.token_ids, (ref(png(), 9),), refused.options)

        async def one(media):
            with open_scope(), pytest.raises(InvalidImage) as failed:
                await parts.gateway.prepare(media)
            return failed.value.param

        found = await asyncio.gather(one(refused), one(other))
        assert found == ["messages[0].content[0].image_url", "messages[0].content[9].image_url"]


async def test_differing_token_relevant_options_are_rejected(arena, preparers, worker):
    own = msgspec.structs.replace(ref(png(), 3), options=b'{"scale":2.0}')
    media = prompt(png(), png(seed=1))
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope(), pytest.raises(InvalidRequest) as failed:
            await parts.gateway.prepare(msgspec.structs.replace(media, items=(media.items[0], own)))
        assert failed.value.param == own.param
        with open_scope():
            shared = await parts.gateway.prepare(MediaPrompt([1, 7], (own,)))
    assert shared.source.options == b'{"scale":2.0}'


async def test_preparer_killed_during_a_job_fails_only_its_request(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:

        async def one(media):
            with open_scope():
                return await parts.answer(media, media.items[0].param)

        slow = prompt(png(seed=1), options=b'{"sleep_s": 0.2}')
        crashing = MediaPrompt(slow.token_ids, (ref(png(seed=2), 1),), b'{"fault": "kill"}')
        fine, crashed = await asyncio.gather(one(slow), one(crashing), return_exceptions=True)
        assert isinstance(crashed, PreparerCrashed)
        assert isinstance(fine, list)
        await eventually(lambda: parts.num_held == 0)


async def test_images_larger_than_the_arena_are_rejected(arena, preparers, worker):
    held = arena.reserve(30 << 20)
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope(), pytest.raises(ArenaFull) as full:
            await parts.answer(prompt(png(600, 600)))
        assert full.value.status == 503
        assert full.value.retry_after_s
        held.abandon()
        with open_scope():
            assert await parts.answer(prompt(png(600, 600)))


#: Tokens of a picture by `png()` according to the fake processor.
TOKENS = 6


@pytest.mark.parametrize("stage", ["features", "decoded", "url"])
@pytest.mark.parametrize("num_cached", [0, 1, 3])
async def test_images_too_long_together_are_rejected_before_any_is_decoded(arena, preparers, worker, stage, num_cached):
    """Each of them fits. The pixels of the new ones are cut off: decoding would find them damaged."""
    seen = spy(worker)
    config = GatewayConfig(stage=stage, **FAST)
    async with Parts(arena, preparers, [worker], config=config, max_tokens=3 * TOKENS) as parts:
        with open_scope():
            await parts.answer(prompt(png(), png(seed=1), png(seed=2)))
        num_prepared = preparers.stats().num_done
        images = [png(seed=n) if n < num_cached else png(seed=10 + n)[:100] for n in range(4)]
        with open_scope() as scope, pytest.raises(PromptTooLong, match=rf"length at least {4 * TOKENS}\)"):
            await parts.answer(prompt(*images))
        assert (scope.failure.error.code, scope.failure.app_responds) == ("prompt_too_long", True)
        with open_scope():
            await parts.answer(prompt(png(), png(seed=1), png(seed=2)))
        assert (preparers.stats().num_failed, preparers.stats().num_done) == (0, num_prepared)
    assert len(seen) == 2


async def test_jobs_of_a_request_rejected_by_size_are_stopped(arena, preparers, worker):
    """Its last image arrives while the others are being prepared."""
    async with Parts(arena, preparers, [worker], max_tokens=3 * TOKENS) as parts:
        parts.fetcher.contents["http://host/a.png"] = png(seed=4)
        late = MediaRef("image", "messages[0].content[3].image_url", url="http://host/a.png")
        wanted = prompt(png(), png(seed=1), png(seed=2), png(seed=3), options=b'{"sleep_s": 30}')
        wanted = msgspec.structs.replace(wanted, items=(*wanted.items[:3], late))
        fetch, arrived = parts.fetcher.fetch, asyncio.Event()

        async def fetch_late(ref, **options):
            if ref.url is not None:
                await arrived.wait()
            return await fetch(ref, **options)

        parts.fetcher.fetch = fetch_late

        async def one():
            with open_scope():
                await parts.gateway.prepare(wanted)

        rejected = asyncio.create_task(one())
        await eventually(lambda: (preparers.stats().num_busy, preparers.stats().num_queued) == (2, 1))
        arrived.set()
        with pytest.raises(PromptTooLong) as error:
            await rejected
        assert error.value.param == late.param
        await eventually(lambda: preparers.stats().num_busy == preparers.stats().num_queued == 0)


@pytest.mark.parametrize("stage", ["features", "decoded"])
async def test_image_that_never_fits_the_arena_is_rejected_before_decoding(arena, preparers, worker, stage):
    """32 MiB of arena: 48 MB of pixels, four times that of features. A decoder would find this file damaged."""
    file = io.BytesIO()
    PILImage.new("RGB", (4000, 4000)).save(file, "PNG")
    async with Parts(arena, preparers, [worker], config=GatewayConfig(stage=stage, **FAST)) as parts:
        with open_scope(), pytest.raises(MediaTooLarge) as refused:
            await parts.answer(prompt(file.getvalue()[:1000]))
    assert (refused.value.status, refused.value.param) == (413, "messages[0].content[0].image_url")
    assert preparers.stats().num_failed == preparers.stats().num_done == 0


async def test_request_over_the_limit_is_rejected_until_another_ends(arena, preparers, worker):
    async with Parts(arena, preparers, [worker], config=GatewayConfig(max_requests=1, **FAST)) as parts:
        with open_scope():
            await parts.gateway.prepare(prompt(png()))
            await parts.gateway.prepare(prompt(png()))  # another prompt of the same request
            with open_scope(), pytest.raises(MediaOverloaded) as refused:
                await parts.gateway.prepare(prompt(png()))
            assert refused.value.retry_after_s
        with open_scope():
            assert await parts.answer(prompt(png()))


async def test_uuids_are_looked_up_after_admission(arena, preparers, worker):
    async with Parts(arena, preparers, [worker], config=GatewayConfig(max_requests=1, **FAST)) as parts:
        with open_scope():
            await parts.gateway.prepare(prompt(png()))
            with open_scope() as scope:
                scope.extracted = ExtractedMedia((MediaRef("image", "p", alias=Alias("u", "image")),))
                with pytest.raises(MediaOverloaded):
                    await parts.gateway.by_uuid(scope.references.text(0))


async def test_text_request_needs_no_preparers_or_leases(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope() as scope:
            assert await parts.generate(request("r", [1, 2, 3]), None)
        assert scope.timeline.cache == "none"
        assert preparers.stats().num_done == 0
