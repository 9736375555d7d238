"""The real engine: features of an arena without a copy, vLLM's outputs, faults that affect only their request."""

import asyncio
import io
import os
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from PIL import Image as PILImage
from prompt_maker import PromptMaker, bytes_of, encoded_item, pixels, plain, request, with_feature
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem
from vllm.sampling_params import RequestOutputKind, SamplingParams

from medialane.arena import Arena, ArenaConfig, ArenaView
from medialane.types.errors import (
    GenerationFailed,
    HandoverFailed,
    InvalidFeature,
    InvalidImage,
    PromptRejected,
    WorkerLost,
)
from medialane.types.feature import MediaPayload
from medialane.types.media import MediaSize
from medialane.types.request import ExpandedPrompt, UnexpandedPrompt
from medialane.types.tensor import InlineTensor, TensorSpec
from medialane.vllm_bridge.engine import engine as engine_module
from medialane.vllm_bridge.items import decode_item, encode_item
from medialane.vllm_bridge.seams.engine import call_every_engine

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

MAX_TOKENS = 8


@pytest.fixture(scope="module")
def maker(renderer):
    return PromptMaker(renderer)


@asynccontextmanager
async def attached(engine, size_bytes=64 << 20):
    """An arena that the engine maps, and a worker's mapping of it."""
    arena = Arena.create(ArenaConfig(size_bytes=size_bytes))
    view = ArenaView.open(arena.id, "/dev/shm")
    try:
        assert await engine.attach_arena(arena.id, arena.nonce)
        yield arena, view
    finally:
        view.close()
        arena.close()


def views_of(prompt, view):
    return [[view.tensor(t) for t in f.tensors] for f in prompt.features]


_ids = iter(range(10**6))


async def deltas_of(engine, prompt, tensors=None, **params):
    sent = request(f"f-{next(_ids)}", prompt, **({"max_tokens": MAX_TOKENS} | params))
    given = bytes_of(prompt) if tensors is None else tensors
    async with aclosing(engine.generate(sent, given)) as deltas:
        return [d async for d in deltas]


def tokens_of(deltas):
    return [token for d in deltas for token in d.completions[0].token_ids]


async def answer(engine, prompt, tensors=None, **params):
    return tokens_of(await deltas_of(engine, prompt, tensors, **params))


async def plain_answer(engine, token_ids, *arrays):
    """vLLM's output for the pixels."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    async for output in engine.llm.generate(plain(token_ids, *arrays), params, f"plain-{next(_ids)}"):
        last = output
    return list(last.outputs[0].token_ids)


class SentBytes:
    """Counts what the front end sends to EngineCore."""

    def __init__(self, engine, monkeypatch):
        self.total = 0
        encoder = engine.llm.engine_core.encoder
        inner = encoder.encode

        def encode(message):
            frames = inner(message)
            self.total += sum(memoryview(f).nbytes for f in frames)
            return frames

        monkeypatch.setattr(encoder, "encode", encode)


@pytest.mark.parametrize("sizes", [[(1024, 768)], [(333, 500), (640, 480), (97, 1211)]], ids=["one", "three"])
async def test_arena_features_reach_engine_core_as_descriptors(vllm_engine, maker, monkeypatch, sizes):
    arrays = [pixels(*size, seed=i) for i, size in enumerate(sizes)]
    expected = await plain_answer(vllm_engine, maker.token_ids(len(arrays)), *arrays)
    async with attached(vllm_engine) as (arena, view):
        prompt, pins = maker.in_arena(arena, *arrays)
        sent = SentBytes(vllm_engine, monkeypatch)
        assert await answer(vllm_engine, prompt, views_of(prompt, view)) == expected
        assert sent.total < 100_000 < sum(f.tensors[0].spec.nbytes for f in prompt.features)
        for pin in pins:
            pin.release()


async def test_inline_features_give_vllms_output(vllm_engine, maker):
    arrays = [pixels(200, 300, 5), pixels(300, 200, 6)]
    expected = await plain_answer(vllm_engine, maker.token_ids(2), *arrays)
    assert await answer(vllm_engine, maker.inline(*arrays)) == expected


async def test_unexpanded_prompt_gives_vllms_output(vllm_engine, maker):
    array = pixels(400, 300, 7)
    expected = await plain_answer(vllm_engine, maker.token_ids(1), array)
    assert await answer(vllm_engine, source(maker, array, "7" * 64)) == expected


def source(maker, array, mm_hash):
    file = io.BytesIO()
    PILImage.fromarray(array).save(file, "PNG")
    return UnexpandedPrompt(maker.token_ids(1), (encoded_item(file.getvalue(), mm_hash),))


async def test_stages_share_the_prefix_cache_by_the_hash(vllm_engine, maker):
    array = pixels(800, 600, 8)
    prompt = maker.inline(array)
    first = await deltas_of(vllm_engine, prompt)
    again = await deltas_of(vllm_engine, source(maker, array, prompt.features[0].mm_hash))
    assert first[0].num_cached_tokens == 0
    assert again[0].num_cached_tokens > 0
    assert tokens_of(again) == tokens_of(first)


async def test_source_with_options_keeps_its_hash(vllm_engine, maker):
    array = pixels(800, 600, 9)
    options = b'{"size":{"longest_edge":200704,"shortest_edge":3136}}'
    prompt = maker.inline(array, options=options)
    await deltas_of(vllm_engine, prompt)
    sent = source(maker, array, prompt.features[0].mm_hash)
    again = await deltas_of(vllm_engine, msgspec.structs.replace(sent, options=options))
    assert again[0].prompt_token_ids == prompt.token_ids
    assert again[0].num_cached_tokens > 0


async def test_undecodable_source_is_a_client_error(vllm_engine, maker):
    for data in (b"no image", b"\x89PNG\r\n\x1a\n"):
        with pytest.raises(InvalidImage):
            await answer(vllm_engine, UnexpandedPrompt(maker.token_ids(1), (encoded_item(data, "a" * 64),)))


async def test_decoded_source_gives_vllms_output(vllm_engine, maker):
    array = pixels(400, 300, 17)
    expected = await plain_answer(vllm_engine, maker.token_ids(1), array)
    assert await answer(vllm_engine, decoded(maker, array)) == expected


async def test_decoded_source_of_wrong_size_never_reaches_the_engine(vllm_engine, maker):
    prompt = decoded(maker, pixels(400, 300, 18))
    larger = msgspec.structs.replace(prompt.media[0], size=MediaSize(400, 301))
    with pytest.raises(InvalidFeature, match="do not make"):
        await answer(vllm_engine, msgspec.structs.replace(prompt, media=(larger,)))
    with pytest.raises(InvalidFeature, match="0 tensors"):
        await answer(vllm_engine, prompt, [[]])


def decoded(maker, array):
    height, width, _ = array.shape
    tensor = InlineTensor(TensorSpec("uint8", array.shape), array.tobytes())
    item = MediaPayload("image", "d" * 64, b"", (tensor,), MediaSize(width, height))
    return UnexpandedPrompt(maker.token_ids(1), (item,), stage="decoded")


async def test_source_without_its_placeholder_or_with_too_many_items_is_rejected(vllm_engine, maker):
    prompt = source(maker, pixels(30, 30), "a" * 64)
    with pytest.raises(PromptRejected):
        await answer(vllm_engine, msgspec.structs.replace(prompt, token_ids=[100, 101]))
    with pytest.raises(PromptRejected, match="At most 8 image"):
        await answer(vllm_engine, msgspec.structs.replace(prompt, media=prompt.media * 9))


def changed(prompt, **fields):
    """An inline prompt whose first item has other tensors: header and bytes agree with each other."""
    item = decode_item(prompt.features[0].header, bytes_of(prompt)[0])
    elems = {name: MultiModalFieldElem(fields.get(name, e.data), e.field) for name, e in item.items()}
    header, _, buffers = encode_item(MultiModalKwargsItem(elems))
    return with_feature(prompt, header=header), [list(buffers)]


async def test_malformed_features_never_reach_the_engine(vllm_engine, maker):
    """Unvalidated, each of these terminates vLLM's engine or gives silent garbage."""
    prompt = maker.inline(pixels(280, 280, 10))
    rows = decode_item(prompt.features[0].header, bytes_of(prompt)[0])["pixel_values"].data
    place = prompt.features[0].placeholder
    malformed = {
        "grid": changed(prompt, image_grid_thw=torch.tensor([1, 40, 40])),
        "rows": changed(prompt, pixel_values=rows[:-4]),
        "grid that cannot be merged": changed(prompt, image_grid_thw=torch.tensor([1, 1, len(rows)])),
        "longer placeholder": (_moved(prompt, length=place.length + 4), bytes_of(prompt)),
        "shorter placeholder": (_moved(prompt, length=place.length - 1), bytes_of(prompt)),
        "beyond the prompt": (_moved(prompt, offset=len(prompt.token_ids) - 1), bytes_of(prompt)),
        "no tensors": (prompt, [[]]),
        "short tensor": (prompt, [[bytes_of(prompt)[0][0][:-1]]]),
        "no header": (with_feature(prompt, header=b""), bytes_of(prompt)),
    }
    expected = await answer(vllm_engine, prompt)
    for what, (bad, tensors) in malformed.items():
        with pytest.raises(InvalidFeature):
            await answer(vllm_engine, bad, tensors)
        assert await answer(vllm_engine, prompt) == expected, what


def _moved(prompt, **changes):
    return with_feature(prompt, placeholder=msgspec.structs.replace(prompt.features[0].placeholder, **changes))


async def test_entry_unreadable_to_engine_core_fails_only_its_request(vllm_engine, maker):
    async with attached(vllm_engine) as (arena, view):
        good, pins = maker.in_arena(arena, pixels(300, 300, 11))
        expected = await answer(vllm_engine, good, views_of(good, view))
        (tensor,) = good.features[0].tensors
        stale = msgspec.structs.replace(tensor, range=msgspec.structs.replace(tensor.range, generation=10**9))
        bad = with_feature(good, tensors=(stale,), mm_hash="b" * 64)
        other, more_pins = maker.in_arena(arena, pixels(300, 300, 13))
        undisturbed = await answer(vllm_engine, other, views_of(other, view))
        innocent = asyncio.create_task(answer(vllm_engine, other, views_of(other, view)))
        refused = [answer(vllm_engine, bad, views_of(good, view), n=n, temperature=n - 1) for n in (1, 1, 2)]
        for error in await asyncio.gather(*refused, return_exceptions=True):
            assert isinstance(error, HandoverFailed), error
        assert await innocent == undisturbed
        repaired = with_feature(good, mm_hash="b" * 64)
        assert await answer(vllm_engine, repaired, views_of(good, view)) == expected
        for pin in (*pins, *more_pins):
            pin.release()


async def test_features_of_an_unattached_arena_are_copied(vllm_engine, maker):
    arena = Arena.create(ArenaConfig(size_bytes=64 << 20))
    try:
        assert not await vllm_engine.attach_arena(arena.id, b"another nonce...")
        prompt, pins = maker.in_arena(arena, pixels(200, 200, 12))
        tensors = views_of(prompt, arena.view)
        expected = await plain_answer(vllm_engine, maker.token_ids(1), pixels(200, 200, 12))
        assert await answer(vllm_engine, prompt, tensors) == expected
        pins[0].release()
        del tensors
    finally:
        arena.close()


async def test_engine_core_unmaps_a_detached_arena(vllm_engine, maker):
    """Its gateway was killed and the next one has unlinked the file: pages that no process maps are freed."""
    free_before = _free_bytes()
    async with attached(vllm_engine, 128 << 20) as (arena, view):
        prompt, pins = maker.in_arena(arena, pixels(640, 480, 21))
        expected = await answer(vllm_engine, prompt, views_of(prompt, view))
        arena.view.memory[-(64 << 20) :] = bytes(64 << 20)  # pages to be freed
        for pin in pins:
            pin.release()
    assert arena.id in _mapped_by_children()
    assert _free_bytes() < free_before - (60 << 20)
    await vllm_engine.detach_arena(arena.id)
    assert arena.id not in _mapped_by_children()
    assert _free_bytes() > free_before - (16 << 20)
    await vllm_engine.detach_arena(arena.id)
    assert await answer(vllm_engine, maker.inline(pixels(640, 480, 21))) == expected


def _free_bytes():
    found = os.statvfs("/dev/shm")
    return found.f_bavail * found.f_frsize


def _mapped_by_children():
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return "".join(Path(f"/proc/{child}/maps").read_text() for child in children)


class Confirmations:
    """Counts the round trips that confirm the engine's release."""

    def __init__(self, engine, monkeypatch):
        self.num = 0
        inner = call_every_engine

        async def counted(llm, method, *args):
            self.num += llm is engine.llm and method == "is_sleeping"
            return await inner(llm, method, *args)

        monkeypatch.setattr(engine_module, "call_every_engine", counted)


async def test_only_abort_and_stop_string_wait_for_confirmation(vllm_engine, maker, monkeypatch):
    prompt = maker.inline(pixels(100, 100))
    confirmations = Confirmations(vllm_engine, monkeypatch)
    tokens = await answer(vllm_engine, prompt)
    assert confirmations.num == 0
    text = "".join(d.completions[0].text for d in await deltas_of(vllm_engine, prompt))
    stopped = await deltas_of(vllm_engine, prompt, stop=[text[3]], max_tokens=200)
    assert stopped[-1].completions[0].stop_reason == text[3]
    assert confirmations.num == 3
    deltas = vllm_engine.generate(request("aborted", prompt, max_tokens=2000), bytes_of(prompt))
    await anext(deltas)
    await deltas.aclose()
    assert confirmations.num == 6
    assert await answer(vllm_engine, prompt) == tokens


async def test_output_ends_only_after_the_engine_confirms(vllm_engine, maker, monkeypatch):
    prompt = maker.inline(pixels(100, 100))
    deltas = vllm_engine.generate(request("unknown", prompt, max_tokens=2000), bytes_of(prompt))
    await anext(deltas)

    async def silent(method, *args, timeout_s):
        raise GenerationFailed("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine, "_ask", silent)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await deltas.aclose()
        with pytest.raises(WorkerLost):
            await vllm_engine.ping(1)
    # Not by monkeypatch, which would put the 1 back: the session's engine would count as lost in all later tests.
    vllm_engine._num_releases_unknown = 0  # which nothing sets back: a worker would be restarted
    await vllm_engine.ping(30)


async def test_multiple_completions_with_logprobs(vllm_engine, maker):
    prompt = maker.inline(pixels(100, 100))
    deltas = await deltas_of(vllm_engine, prompt, n=2, temperature=1.0, seed=1, logprobs=2, prompt_logprobs=1)
    assert {c.index for d in deltas for c in d.completions} == {0, 1}
    assert deltas[0].prompt_logprobs[0] is None
    for completion in (c for d in deltas for c in d.completions):
        assert [position[0].token_id for position in completion.logprobs] == completion.token_ids
        assert all(len(position) in (2, 3) for position in completion.logprobs)


async def test_final_only_output_is_one_delta(vllm_engine, maker):
    prompt = maker.inline(pixels(100, 100))
    streamed = await deltas_of(vllm_engine, prompt)
    (final,) = await deltas_of(vllm_engine, prompt, output_kind=RequestOutputKind.FINAL_ONLY)
    assert final.completions[0].token_ids == tokens_of(streamed)
    assert final.completions[0].text == "".join(d.completions[0].text for d in streamed)
    assert final.times.prefill_s > 0


async def test_out_of_vocabulary_token_is_rejected(vllm_engine):
    for token in (10**6, -1):
        with pytest.raises(PromptRejected, match="out of vocabulary"):
            await answer(vllm_engine, ExpandedPrompt([token]))


async def test_parameters_are_never_unpickled(vllm_engine):
    """vLLM sends pickles as an extension type if configured to."""
    sent = request("pickle", ExpandedPrompt([1]))
    for code in (1, 2):
        pickled = msgspec.msgpack.encode([msgspec.msgpack.Ext(code, b"\x80\x04N.")])
        bad = msgspec.structs.replace(sent, sampling_params=pickled)
        with pytest.raises(PromptRejected):
            await anext(vllm_engine.generate(bad, []))
