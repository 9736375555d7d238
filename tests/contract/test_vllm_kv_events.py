"""The blocks that a live vLLM reports as held equal the gateway's prediction, block by block."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import pytest_asyncio
from kv_watch import BLOCK, Watched, expanded, predicted, spans, text
from prompt_maker import PromptMaker, pixels
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash

from medialane.types.feature import MediaPayload
from medialane.types.kv_blocks import AllBlocksCleared, BlockStored, prompt_block_ids
from medialane.types.media import MediaSize
from medialane.types.request import ExpandedPrompt, UnexpandedPrompt
from medialane.types.tensor import InlineTensor, TensorSpec
from medialane.vllm_bridge.engine.engine_options import HASH_ALGORITHM

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def watched(vllm_engine):
    found = Watched(vllm_engine)
    yield found
    await vllm_engine.events.close()


@pytest.fixture(scope="module")
def maker(renderer):
    return PromptMaker(renderer)


async def test_block_size_and_cache_sizes_equal_the_engines(watched):
    card = watched.engine.card
    assert card.block_size == BLOCK
    assert card.num_kv_blocks > 8
    assert card.max_num_seqs > 0
    assert card.max_num_batched_tokens > 0
    assert card.encoder_cache_tokens > 1000
    assert (card.data_parallel_size, card.max_loras) == (1, 0)


async def test_full_text_blocks_are_held_as_predicted_and_the_tail_is_not(watched):
    await watched.reset()
    prompt = ExpandedPrompt(text(5 * BLOCK + 7, seed=1))
    await watched.run(prompt)
    assert len(predicted(prompt)) == 5
    assert await watched.holds(predicted(prompt))


async def test_shared_prefix_is_held_once(watched):
    await watched.reset()
    common = text(3 * BLOCK, seed=2)
    one, other = (ExpandedPrompt(common + text(2 * BLOCK + 1, seed=s)) for s in (3, 4))
    await watched.run(one)
    first = await watched.run(other)
    assert first.num_cached_tokens == 3 * BLOCK
    assert list(predicted(one))[:3] == list(predicted(other))[:3]
    assert await watched.holds([*predicted(one), *predicted(other)])


async def test_block_ids_depend_on_the_image(watched, maker):
    await watched.reset()
    one, other = (expanded(maker, text(50), pixels(560, 420, s), text(200, 1)) for s in (1, 2))
    assert one.token_ids == other.token_ids
    await watched.run(one)
    assert await watched.holds(predicted(one))
    await watched.run(other)
    assert not set(predicted(one).tolist()) & set(predicted(other).tolist())
    assert await watched.holds([*predicted(one), *predicted(other)])


async def test_several_images_in_one_block(watched, maker):
    await watched.reset()
    small = [pixels(84, 84, seed) for seed in range(5)]
    prompt = expanded(maker, text(10), *small, text(2 * BLOCK, 1))
    assert sum(span.end <= BLOCK for span in spans(prompt)) == 5
    await watched.run(prompt)
    assert await watched.holds(predicted(prompt))


@pytest.mark.parametrize("shift", [-1, 0, 1])
async def test_block_starting_where_an_image_ends_excludes_it(watched, maker, shift):
    await watched.reset()
    picture = pixels(280, 280, 7)
    length = spans(expanded(maker, picture))[0].length
    before = 2 * BLOCK - length - 1 + shift  # one token, <|vision_start|>, stands before it
    prompt = expanded(maker, text(before), picture, text(2 * BLOCK, 1))
    assert spans(prompt)[0].end == 2 * BLOCK + shift
    await watched.run(prompt)
    assert await watched.holds(predicted(prompt))


async def test_image_starting_at_a_block_boundary(watched, maker):
    await watched.reset()
    prompt = expanded(maker, text(BLOCK - 1), pixels(280, 280, 8), text(BLOCK, 1))
    assert spans(prompt)[0].offset == BLOCK
    await watched.run(prompt)
    assert await watched.holds(predicted(prompt))


async def test_block_ids_depend_on_the_cache_salt(watched, maker):
    await watched.reset()
    prompt = expanded(maker, text(BLOCK), pixels(280, 280, 9), text(BLOCK, 1))
    await watched.run(prompt, cache_salt="tenant")
    salted = predicted(prompt, cache_salt="tenant")
    assert await watched.holds(salted)
    assert not set(salted.tolist()) & set(predicted(prompt).tolist())


# The arena is mapped read-only; torch warns about the first such array, and nothing writes to it.
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
async def test_video_expanded_by_the_worker_is_held_as_placed(watched, maker):
    await watched.reset()
    frames = np.stack([pixels(112, 84, seed) for seed in range(8)])
    size = MediaSize(width=112, height=84, num_frames=8, metadata=b'{"fps":2.0,"duration":4.0,"total_num_frames":8}')
    name = "5eed" * 16  # the encoder cache of the engine is not reset, and other tests may use the same names
    item = MediaPayload("video", name, b"", (InlineTensor(TensorSpec("uint8", frames.shape), frames.tobytes()),), size)
    pads = maker.tokenizer.encode("<|vision_start|><|video_pad|><|vision_end|>")
    first = await watched.run(UnexpandedPrompt(text(100) + pads + text(300, 1), (item,), stage="decoded"))
    (placed,) = first.placed
    assert (placed.modality, placed.mm_hash, placed.offset) == ("video", name, 101)
    assert 0 < placed.num_embeds <= placed.length
    ids = prompt_block_ids(first.prompt_token_ids, block_size=BLOCK, media=first.placed)
    assert len(ids) >= 3
    assert await watched.holds(ids)


async def test_prompt_expanded_by_the_gateway_is_not_placed_again(watched, maker):
    assert (await watched.run(expanded(maker, text(10), pixels(84, 84, 3)))).placed == ()


async def test_vllms_own_hasher_agrees_with_its_events(watched, maker):
    await watched.reset()
    prompt = expanded(maker, text(60), pixels(280, 280, 11), pixels(84, 84, 12), text(2 * BLOCK, 1))
    await watched.run(prompt, cache_salt="s")
    assert await watched.holds(predicted(prompt, cache_salt="s"))
    reported = [key for event in watched.events if isinstance(event, BlockStored) for key in event.block_hashes]
    hash_fn = get_hash_fn_by_name(HASH_ALGORITHM)
    init_none_hash(hash_fn)
    features = [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=s.mm_hash, mm_position=PlaceholderRange(s.offset, s.length)
        )
        for s in spans(prompt)
    ]
    request = SimpleNamespace(
        block_hashes=[],
        num_tokens=len(prompt.token_ids),
        all_token_ids=prompt.token_ids,
        mm_features=features,
        lora_request=None,
        cache_salt="s",
        prompt_embeds=None,
    )
    expected = [maybe_convert_block_hash(h) for h in get_request_block_hasher(BLOCK, hash_fn)(request)]
    assert reported == expected


async def test_concurrent_requests_leave_their_blocks_without_faults(watched):
    """Equal ones may compute the same block twice: copies are removed separately, the block is held until both are."""
    await watched.reset()
    prompts = [ExpandedPrompt(text(3 * BLOCK, seed=20 + i % 2)) for i in range(6)]
    await asyncio.gather(*map(watched.run, prompts))
    assert await watched.holds([*predicted(prompts[0]), *predicted(prompts[1])])


async def test_cache_reset_is_reported_with_the_next_step(watched):
    before, after = ExpandedPrompt(text(2 * BLOCK, 30)), ExpandedPrompt(text(2 * BLOCK, 31))
    await watched.run(before)
    await watched.reset()
    await watched.run(after)
    assert await watched.holds(predicted(after))
    assert AllBlocksCleared() in watched.events


async def test_engine_cannot_report_already_held_blocks(watched):
    """`kv_cache_report_mode` would report each block again, as if it were another copy."""
    await watched.reset()
    prompt = ExpandedPrompt(text(2 * BLOCK + 1, 32))
    for _ in range(2):
        await watched.run(prompt, params={"extra_args": {"kv_cache_report_mode": "full"}})
    assert await watched.holds(predicted(prompt))
    assert sum(isinstance(event, BlockStored) for event in watched.events) == 1
