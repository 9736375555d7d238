"""Embeddings in the real engine: what its encoder computed is saved in an arena, and loaded instead of encoding."""

import asyncio
from contextlib import aclosing
from itertools import repeat

import msgspec
import pytest
import pytest_asyncio
import torch
from embedding_host import answer, counted, host_of, moved, saved, since, without_tensors
from kv_watch import start_engine
from prompt_maker import PromptMaker, bytes_of, pixels, request
from safetensors.torch import load_file

from medialane.types.admin import ResetEncoderCache, ResetPrefixCache
from medialane.types.errors import HandoverFailed, InvalidFeature, WorkerLost
from medialane.types.feature import EmbeddingUse
from medialane.types.request import EmbeddingCounts
from medialane.vllm_bridge.engine.engine_request import RequestReader

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

NUM_AT_ONCE = 200


@pytest.fixture(scope="module")
def maker(renderer):
    return PromptMaker(renderer)


@pytest_asyncio.fixture(loop_scope="session")
async def host(vllm_engine):
    async with host_of(vllm_engine) as found:
        await found.forget()
        yield found


async def test_embedding_that_was_saved_is_loaded_instead_of_encoding(vllm_engine, maker, host):
    array = pixels(300, 200, 40)
    prompt = maker.inline(array)
    expected = await answer(vllm_engine, prompt)
    await host.forget()
    reservation, tensor = host.reserved(prompt.features[0])
    before = await counted(vllm_engine)
    assert await answer(vllm_engine, prompt, [EmbeddingUse(tensor, is_filled=False)]) == expected
    assert await since(vllm_engine, before) == EmbeddingCounts(encoded=1, saved=1)
    assert host.arena.is_completed(reservation)
    await host.forget()
    known = without_tensors(prompt, 0)
    assert await answer(vllm_engine, known, [EmbeddingUse(tensor, is_filled=True)]) == expected
    assert await since(vllm_engine, before) == EmbeddingCounts(loaded=1, encoded=1, saved=1)


async def test_item_is_what_its_embedding_says(vllm_engine, maker, host):
    """Another picture's embedding gives the other's answer: nothing of the item's own is encoded."""
    one, other = maker.inline(pixels(280, 280, 41)), maker.inline(pixels(280, 280, 42))
    expected, _ = await saved(vllm_engine, host, one)
    differs, uses = await saved(vllm_engine, host, other)
    assert differs != expected
    assert await answer(vllm_engine, without_tensors(one, 0), uses) == differs


async def test_of_two_images_only_the_unknown_one_is_encoded(vllm_engine, maker, host):
    arrays = [pixels(300, 200, 43), pixels(200, 340, 44)]
    _, (known,) = await saved(vllm_engine, host, maker.inline(arrays[1]))
    prompt = maker.inline(*arrays)
    expected = await answer(vllm_engine, prompt)
    await host.forget()
    before = await counted(vllm_engine)
    assert await answer(vllm_engine, without_tensors(prompt, 1), [None, known]) == expected
    assert await since(vllm_engine, before) == EmbeddingCounts(loaded=1, encoded=1)


async def test_item_in_the_encoder_cache_is_saved_without_encoding_it_again(vllm_engine, maker, host):
    prompt = maker.inline(pixels(300, 220, 45))
    expected = await answer(vllm_engine, prompt)
    assert await vllm_engine.administer(ResetPrefixCache())
    reservation, tensor = host.reserved(prompt.features[0])
    before = await counted(vllm_engine)
    assert await answer(vllm_engine, prompt, [EmbeddingUse(tensor, is_filled=False)]) == expected
    assert await since(vllm_engine, before) == EmbeddingCounts(saved=1)
    assert host.arena.is_completed(reservation)


async def test_preempted_request_loads_its_embedding_again(vllm_engine, maker, host):
    prompt = maker.inline(pixels(300, 230, 46))
    _, uses = await saved(vllm_engine, host, prompt)
    expected = await answer(vllm_engine, without_tensors(prompt, 0), uses, max_tokens=64)
    await host.forget()
    before = await counted(vllm_engine)
    sent = request("preempted", without_tensors(prompt, 0), max_tokens=64)
    tokens = []
    async with aclosing(vllm_engine.generate(sent, [[]], uses)) as deltas:
        async for delta in deltas:
            is_first = not tokens  # a delta has several tokens if this process was busy meanwhile
            tokens += delta.completions[0].token_ids
            if is_first:
                await vllm_engine.administer(ResetEncoderCache())
                await vllm_engine.administer(ResetPrefixCache(reset_running_requests=True))
    assert tokens == expected
    assert await since(vllm_engine, before) == EmbeddingCounts(loaded=2)


def cacheable(maker, prompt):
    """The prompt with text behind its items, so that all of them lie in full blocks."""
    return msgspec.structs.replace(prompt, token_ids=[*prompt.token_ids, *maker.tokenizer.encode("a word " * 130)])


async def test_request_without_media_is_answered_from_blocks_alone(vllm_engine, maker, host):
    prompt = cacheable(maker, maker.inline(pixels(300, 200, 70), pixels(200, 300, 71)))
    expected = await answer(vllm_engine, prompt)
    before, bare = await counted(vllm_engine), without_tensors(prompt, 0, 1)
    assert await answer(vllm_engine, bare, without_media=True) == expected
    await host.forget()
    with pytest.raises(HandoverFailed):
        await answer(vllm_engine, bare, without_media=True)
    assert await since(vllm_engine, before) == EmbeddingCounts(failed=1)
    assert await answer(vllm_engine, prompt) == expected


async def test_preempted_request_without_media_may_go_on_elsewhere(vllm_engine, maker, host):
    prompt = cacheable(maker, maker.inline(pixels(300, 200, 72)))
    expected = await answer(vllm_engine, prompt, max_tokens=64)
    sent = request("preempted-bare", without_tensors(prompt, 0), max_tokens=64)
    sent, tokens = msgspec.structs.replace(sent, without_media=True), []

    async def run():
        async with aclosing(vllm_engine.generate(sent, [[]])) as deltas:
            async for delta in deltas:
                is_first = not tokens
                tokens.extend(delta.completions[0].token_ids)
                if is_first:
                    await vllm_engine.administer(ResetPrefixCache(reset_running_requests=True))

    with pytest.raises(WorkerLost):
        await run()
    assert tokens == expected[: len(tokens)]
    assert await answer(vllm_engine, prompt, max_tokens=64) == expected


async def test_nothing_is_written_after_an_aborted_request(vllm_engine, maker, host):
    for seed in range(3):
        prompt = maker.inline(pixels(640, 480, 50 + seed))
        reservation, tensor = host.reserved(prompt.features[0])
        deltas = vllm_engine.generate(
            request(f"aborted-{seed}", prompt, max_tokens=500),
            bytes_of(prompt),
            [EmbeddingUse(tensor, is_filled=False)],
        )
        first = asyncio.ensure_future(anext(deltas))
        if seed:
            await asyncio.wait({first}, timeout=0.002 * seed)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await deltas.aclose()
        assert host.arena.view.entry(reservation.range)
        reservation.buffer[:] = b"\1" * len(reservation.buffer)
        await answer(vllm_engine, maker.inline(pixels(200, 200, 60)))
        assert bytes(reservation.buffer) == b"\1" * len(reservation.buffer)


async def test_embedding_that_cannot_be_read_fails_only_its_request(vllm_engine, maker, host):
    prompt = maker.inline(pixels(300, 240, 47))
    expected, (use,) = await saved(vllm_engine, host, prompt)
    other = maker.inline(pixels(300, 300, 48))
    undisturbed = await answer(vllm_engine, other)
    innocent = asyncio.create_task(answer(vllm_engine, other))
    bad = moved(use, generation=10**9)
    known = without_tensors(prompt, 0)
    refused = [answer(vllm_engine, known, [bad], n=n, temperature=n - 1) for n in (1, 1, 2)]
    for error in await asyncio.gather(*refused, return_exceptions=True):
        assert isinstance(error, HandoverFailed), error
    assert await innocent == undisturbed
    assert await answer(vllm_engine, prompt) == expected
    await host.forget()
    assert await answer(vllm_engine, known, [use]) == expected


async def test_embedding_that_does_not_fit_never_reaches_the_engine(vllm_engine, maker, host):
    prompt = maker.inline(pixels(300, 250, 49))
    expected, (use,) = await saved(vllm_engine, host, prompt)
    rows, width = use.tensor.spec.shape
    unfit = [host.reserved(prompt.features[0], shape=shape)[1] for shape in ((rows - 1, width), (rows, width // 2))]
    unfit.append(host.reserved(prompt.features[0], dtype="float32")[1])
    unfit.append(moved(use, arena="f" * 32).tensor)
    known = without_tensors(prompt, 0)
    before = await counted(vllm_engine)
    for tensor in unfit:
        with pytest.raises(HandoverFailed):
            await answer(vllm_engine, known, [EmbeddingUse(tensor, is_filled=True)])
        assert await answer(vllm_engine, prompt, [EmbeddingUse(tensor, is_filled=False)]) == expected
    assert await since(vllm_engine, before) == EmbeddingCounts(encoded=1)


async def test_item_with_an_embedding_is_validated_like_any_other(vllm_engine, maker, host):
    prompt = maker.inline(pixels(300, 260, 50))
    expected, (use,) = await saved(vllm_engine, host, prompt)
    good = without_tensors(prompt, 0)
    (feature,) = good.features
    longer = msgspec.structs.replace(feature.placeholder, offset=feature.placeholder.offset + 1)
    other = maker.inline(pixels(400, 260, 50)).features[0]
    for changes in ({"header": b""}, {"header": other.header}, {"placeholder": longer}, {"mm_hash": ""}):
        bad = msgspec.structs.replace(good, features=(msgspec.structs.replace(feature, **changes),))
        with pytest.raises(InvalidFeature):
            await answer(vllm_engine, bad, [use])
    assert await answer(vllm_engine, good, [use]) == expected


async def test_embeddings_of_many_requests_at_once_are_saved_and_loaded(vllm_engine, maker, host):
    """Many requests at once: the scheduler asks about each of them."""
    prompts = [maker.inline(pixels(56, 56, 1000 + number)) for number in range(NUM_AT_ONCE)]
    uses = [[EmbeddingUse(host.reserved(prompt.features[0])[1], is_filled=False)] for prompt in prompts]
    before = await counted(vllm_engine)
    await asyncio.gather(*map(answer, repeat(vllm_engine), prompts, uses))
    await host.forget()
    known = [without_tensors(prompt, 0) for prompt in prompts]
    filled = [[EmbeddingUse(use.tensor, is_filled=True)] for (use,) in uses]
    await asyncio.gather(*map(answer, repeat(vllm_engine), known, filled))
    assert await since(vllm_engine, before) == EmbeddingCounts(NUM_AT_ONCE, NUM_AT_ONCE, NUM_AT_ONCE)


async def test_clients_cannot_address_the_connector(vllm_engine, maker):
    mine = {"ec_transfer_params": {"medialane": b"\xc1"}, "mine": 1}
    reader = RequestReader(vllm_engine.llm, None, frozenset(), None)
    params = reader.params(request("r", maker.inline(pixels(30, 30)), extra_args=mine))
    reader.renderer.close()
    assert params.extra_args == {"mine": 1}


async def test_clients_may_send_what_they_may_without_the_connector(vllm_engine):
    """vLLM enables embeddings sent by clients for engines with a connector."""
    config = vllm_engine.llm.vllm_config
    assert config.ec_transfer_config.is_ec_transfer_instance
    media = config.model_config.multimodal_config
    assert (media.enable_mm_embeds, media.allow_missing_mm_embeddings) == (False, False)


async def test_calls_that_may_change_weights_change_the_encoders_digest(vllm_engine):
    before = vllm_engine.card.encoder
    await vllm_engine.administer(ResetPrefixCache())
    assert vllm_engine.card.encoder == before
    await vllm_engine.administer(ResetEncoderCache())
    after = vllm_engine.card.encoder
    assert after.digest != before.digest
    assert msgspec.structs.replace(after, digest=before.digest) == before


async def test_saved_bytes_are_those_of_vllms_own_connector(vllm_engine, maker, host, tiny_model, tmp_path):
    """`ECExampleConnector` saves files. Of its engine embeddings are not kept: the operator has another connector."""
    prompt = maker.inline(pixels(300, 200, 51))
    expected, (use,) = await saved(vllm_engine, host, prompt)
    settings = {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    limits = '--limit-mm-per-prompt={"image": {"count": 8, "width": 56, "height": 56}, "video": 0}'
    engine = start_engine(tiny_model, f"--ec-transfer-config={msgspec.json.encode(settings).decode()}", limits)
    try:
        await engine.learn_encoder()
        assert (engine.card.encoder, engine.card.no_embeddings) == (None, "--ec-transfer-config is set")
        assert await answer(engine, prompt) == expected
    finally:
        await engine.close()
    (file,) = tmp_path.glob(f"{prompt.features[0].mm_hash}/*.safetensors")
    assert torch.equal(load_file(file)["ec_cache"], host.values(use.tensor))
