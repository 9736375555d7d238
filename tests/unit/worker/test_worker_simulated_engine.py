import asyncio
from contextlib import aclosing

import msgspec
import pytest

from medialane.testing.simulated import SimulatedConfig, SimulatedEngine
from medialane.testing.simulated.engine import step_s
from medialane.testing.simulated.scheduler import SimulatedStep
from medialane.types.errors import GenerationFailed, InvalidFeature, PromptRejected, WorkerBusy, WorkerLost
from medialane.types.feature import EmbeddingUse, MediaPayload, PlaceholderRange
from medialane.types.kv_blocks import AllBlocksCleared, BlockStored
from medialane.types.request import EngineRequest, ExpandedPrompt, UnexpandedPrompt
from medialane.types.tensor import ArenaRange, TensorDescriptor, TensorSpec
from waiting import eventually

FAST = SimulatedConfig(speedup=1000.0)
DELTA = 1


def request(tokens=range(40), *, name="r", features=(), **params):
    sampling = msgspec.msgpack.encode({"max_tokens": 4, "output_kind": DELTA, "temperature": 0.0} | params)
    return EngineRequest(name, ExpandedPrompt(list(tokens), tuple(features)), sampling)


def image(mm_hash, offset, length):
    return MediaPayload("image", mm_hash, b"", (), placeholder=PlaceholderRange(offset, length))


async def answer(engine, asked):
    return [delta async for delta in engine.generate(asked, [])]


@pytest.fixture
async def engine():
    made = SimulatedEngine(FAST, model="m")
    yield made
    await made.close()


async def test_output_streams_token_by_token_and_reports_cached_tokens(engine):
    first = await answer(engine, request())
    again = await answer(engine, request(name="s"))
    assert [len(d.completions[0].token_ids) for d in first] == [1, 1, 1, 1]
    assert [d.finished for d in first] == [False, False, False, True]
    assert first[-1].completions[0].finish_reason == "length"
    assert all(d.prompt_token_ids is None for d in first)  # the gateway has them
    assert (first[0].num_cached_tokens, again[0].num_cached_tokens) == (0, 32)
    assert first[0].completions[0].token_ids == again[0].completions[0].token_ids


async def test_output_kinds_match_vllm(engine):
    cumulative = await answer(engine, request(output_kind=0))
    final = await answer(engine, request(output_kind=2))
    assert [len(d.completions[0].token_ids) for d in cumulative] == [1, 2, 3, 4]
    assert [len(d.completions[0].token_ids) for d in final] == [4]
    assert final[0].times is not None


async def test_final_output_has_all_choices(engine):
    streamed = await answer(engine, request(n=3))
    (final,) = await answer(engine, request(output_kind=2, n=3))
    assert [choice.index for choice in final.completions] == [0, 1, 2]
    for choice in final.completions:
        deltas = [delta.completions[0] for delta in streamed if delta.completions[0].index == choice.index]
        assert choice.token_ids == [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize(("output_kind", "after_s"), [(1, 0.0), (2, 0.010)])
async def test_first_output_says_how_long_ago_the_first_token_was(output_kind, after_s):
    engine = SimulatedEngine(SimulatedConfig(step_ms=0.0, decode_token_ms=2.0), model="m")
    first, *_ = await answer(engine, request(output_kind=output_kind, max_tokens=6))
    assert first.times.decode_s == pytest.approx(after_s)
    await engine.close()


async def test_tokens_after_the_first_are_batched_on_request():
    engine = SimulatedEngine(SimulatedConfig(speedup=1000.0, stream_interval=3), model="m")
    found = await answer(engine, request(max_tokens=6))
    assert [len(d.completions[0].token_ids) for d in found] == [1, 3, 2]
    await engine.close()


async def test_first_token_takes_the_time_of_its_prompt_and_images():
    config = SimulatedConfig(
        speedup=100.0, step_ms=2.0, prefill_token_ms=1.0, prefill_pair_ns=0.0, decode_token_ms=5.0, embedding_ms=10.0
    )
    engine = SimulatedEngine(config, model="m")
    first, *_ = await answer(engine, request(features=[image("i", 3, 20)]))
    assert first.times.prefill_s == pytest.approx(0.002 + 0.040 + 0.200)
    assert first.times.queue_s >= 0
    assert step_s(config, SimulatedStep(num_decode_tokens=1)) == pytest.approx(0.007)
    await engine.close()


async def test_embeddings_from_the_arena_are_loaded_instead_of_computed():
    config = SimulatedConfig(speedup=1000.0, embedding_ms=1e4, load_ms_per_mib=0.0)  # 80 s a run of the encoder
    engine = SimulatedEngine(config, model="m")
    tensor = TensorDescriptor(TensorSpec("uint8", (8,)), ArenaRange("a", 0, 8, 1), 0)
    asked = request(features=[image("i", 2, 8)])
    found = [d async for d in engine.generate(asked, [[]], [EmbeddingUse(tensor, is_filled=True)])]
    assert found[0].times.prefill_s < 1
    other = request(name="s", tokens=range(100, 140), features=[image("j", 2, 8)])
    found = [d async for d in engine.generate(other, [[]], [EmbeddingUse(tensor, is_filled=False)])]
    assert found[0].times.prefill_s > 79
    await engine.close()


def test_loaded_embeddings_take_time_by_their_size():
    config = SimulatedConfig(step_ms=0.0, load_ms_per_mib=2.0, embedding_bytes=1 << 19)
    assert step_s(config, SimulatedStep(num_loaded_embeds=3)) == pytest.approx(0.003)


async def test_blocks_are_reported_after_their_step(engine):
    batches = []
    engine.watch_blocks(batches.append)
    await answer(engine, request(range(40)))
    assert [type(e) for b in batches for e in b.events] == [BlockStored]
    assert batches[0].rank == 0
    assert engine.reset_prefix_cache()
    assert [type(e) for e in batches[-1].events] == [AllBlocksCleared]
    assert (await answer(engine, request(range(40))))[0].num_cached_tokens == 0


async def test_load_counts_running_and_waiting_requests():
    engine = SimulatedEngine(SimulatedConfig(max_num_seqs=1), model="m")
    async with aclosing(engine.generate(request(max_tokens=1000), [])) as deltas:
        await anext(deltas)
        waiting = asyncio.create_task(answer(engine, request(name="s", max_tokens=1)))
        await eventually(lambda: engine.loads()[0].num_waiting == 1)
        load = engine.loads()[0]
        assert load.num_running == 1
        assert load.kv_usage > 0
    await waiting
    assert engine.loads()[0].kv_usage == 0
    await engine.close()


async def test_cancelled_request_frees_its_blocks(engine):
    task = asyncio.create_task(answer(engine, request(max_tokens=30_000)))
    await eventually(lambda: engine.loads()[0].num_running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.loads()[0].num_running == 0
    assert len(await answer(engine, request())) == 4


async def test_closed_engine_fails_requests_in_flight():
    engine = SimulatedEngine(SimulatedConfig(), model="m")
    task = asyncio.create_task(answer(engine, request(max_tokens=1000)))
    await eventually(lambda: engine.loads()[0].num_running == 1)
    await engine.close()
    with pytest.raises(WorkerLost):
        await task
    with pytest.raises(WorkerLost):
        await engine.ping(1)


async def test_step_failure_ends_the_engine_and_its_requests(engine):
    def fail(_batch):
        raise RuntimeError("the listener is broken")

    engine.watch_blocks(fail)
    with pytest.raises(WorkerLost):
        await answer(engine, request())
    with pytest.raises(WorkerLost):
        await engine.ping(1)


async def test_output_ends_at_the_model_length(engine):
    found = await answer(engine, request(range(FAST.max_model_len - 2), max_tokens=None, output_kind=2))
    assert len(found[0].completions[0].token_ids) == 2


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (request(range(40_000)), PromptRejected),
        (request([]), PromptRejected),
        (request(n=0), PromptRejected),
        (request(features=[image("i", 30, 20)]), InvalidFeature),
        (request(range(20_000), features=[image("i", 0, 17_000)]), PromptRejected),
        (EngineRequest("r", ExpandedPrompt([1]), b"\xc1"), PromptRejected),
        (EngineRequest("r", UnexpandedPrompt([1], ()), b"\x80"), GenerationFailed),
    ],
)
async def test_unsupported_requests_are_rejected(engine, asked, error):
    with pytest.raises(error):
        await answer(engine, asked)
    assert engine.loads()[0].num_waiting == 0


@pytest.mark.parametrize("limits", [{"max_queued_reqs": 2}, {"max_queued_tokens": 80}])
async def test_full_queue_refuses_requests_until_one_is_done(limits):
    engine = SimulatedEngine(SimulatedConfig(speedup=1000.0, prefill_token_ms=2000.0, **limits), model="m")
    running = [asyncio.create_task(answer(engine, request(name=f"r{n}", max_tokens=1))) for n in range(2)]
    await eventually(lambda: engine.loads()[0].num_running + engine.loads()[0].num_waiting == 2)
    with pytest.raises(WorkerBusy):
        await answer(engine, request(name="busy"))
    await asyncio.gather(*running)
    assert len(await answer(engine, request(name="later"))) == 4
    await engine.close()
