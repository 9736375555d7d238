"""Embeddings in an engine of several processes: two data-parallel ranks, each of two tensor-parallel ones.

Each rank has a scheduler, an encoder cache, and a KV cache of its own; of a tensor-parallel group all processes load an
embedding, and one saves it. This engine is the one whose answers are compared: more processes add in another order.
"""

import asyncio

import pytest
import pytest_asyncio
from embedding_host import answer, counted, host_of, saved, since, without_tensors
from kv_watch import start_engine
from prompt_maker import PromptMaker, pixels
from test_vllm_engine_embeddings import moved

from medialane.core.errors import HandoverFailed
from medialane.core.feature import EmbeddingUse
from medialane.core.request import EmbeddingCounts

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

RANKS = (0, 1)


@pytest.fixture(scope="module")
def maker(renderer):
    return PromptMaker(renderer)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranks(tiny_model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM binds no two ranks to one NUMA node
        engine = start_engine(
            tiny_model,
            "--data-parallel-size=2",
            "--tensor-parallel-size=2",
            "--max-model-len=2048",
            f"--kv-cache-memory-bytes={64 << 20}",
        )
    await engine.learn_encoder()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def host(ranks):
    async with host_of(ranks) as found:
        await found.forget()
        yield found


async def test_embedding_saved_by_a_rank_is_loaded_by_the_other(ranks, maker, host):
    for rank in RANKS:
        prompt = maker.inline(pixels(300, 200, 70 + rank))
        expected = await answer(ranks, prompt, rank=rank)
        before = await counted(ranks)
        tokens, uses = await saved(ranks, host, prompt, rank=rank)
        assert tokens == expected
        assert await since(ranks, before) == EmbeddingCounts(encoded=1, saved=1)
        known = without_tensors(prompt, 0)
        assert [await answer(ranks, known, uses, rank=r) for r in RANKS] == [expected] * 2
        assert await since(ranks, before) == EmbeddingCounts(loaded=2, encoded=1, saved=1)


async def test_an_embedding_is_saved_once_if_all_ranks_encode_its_item(ranks, maker, host):
    """As far as ranks know: the store does not ask two requests for the same item."""
    prompt = maker.inline(pixels(300, 200, 75))
    _, tensor = host.reserved(prompt.features[0])
    before = await counted(ranks)
    use = EmbeddingUse(tensor, is_filled=False)
    one, other = await asyncio.gather(*(answer(ranks, prompt, [use], rank=rank) for rank in RANKS))
    assert one == other
    assert await since(ranks, before) == EmbeddingCounts(encoded=2, saved=1)


async def test_embedding_that_cannot_be_read_fails_only_its_request_at_a_rank(ranks, maker, host):
    prompt = maker.inline(pixels(300, 240, 77))
    expected, (use,) = await saved(ranks, host, prompt, rank=0)
    other = maker.inline(pixels(300, 300, 78))
    undisturbed = await answer(ranks, other, rank=1)
    innocent = asyncio.create_task(answer(ranks, other, rank=1))
    known = without_tensors(prompt, 0)
    with pytest.raises(HandoverFailed):
        await answer(ranks, known, [moved(use, generation=10**9)], rank=1)
    assert await innocent == undisturbed
    assert await answer(ranks, known, [use], rank=1) == expected
