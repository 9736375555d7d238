"""Embeddings in an engine of several processes: tensor-parallel ranks, and data-parallel ranks of two of these.

Each data-parallel rank has a scheduler, an encoder cache, and a KV cache of its own; of a tensor-parallel group all
processes load an embedding, and one saves it. This engine is the one whose answers are compared: more processes add in
another order.
"""

import asyncio

import pytest
import pytest_asyncio
from embedding_host import answer, counted, host_of, moved, saved, since, without_tensors
from kv_watch import start_engine
from prompt_maker import PromptMaker, pixels

from medialane.types.errors import HandoverFailed
from medialane.types.feature import EmbeddingUse
from medialane.types.request import EmbeddingCounts

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

#: vLLM's flags.
ENGINES = [
    pytest.param(["--tensor-parallel-size=2"], id="TP 2"),
    pytest.param(
        ["--data-parallel-size=2", "--tensor-parallel-size=2"],
        id="DP 2, TP 2",
        marks=pytest.mark.slow,  # six processes: a minute of both cores to start
    ),
]


@pytest.fixture(scope="module")
def maker(renderer):
    return PromptMaker(renderer)


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=ENGINES)
async def engine(tiny_model, request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM binds no two ranks to one NUMA node
        engine = start_engine(tiny_model, *request.param, "--max-model-len=2048", f"--kv-cache-memory-bytes={64 << 20}")
    await engine.learn_encoder()
    yield engine
    await engine.close()


@pytest.fixture
def ranks(engine):
    return list(range(engine.card.data_parallel_size))


@pytest_asyncio.fixture(loop_scope="session")
async def host(engine):
    async with host_of(engine) as found:
        await found.forget()
        yield found


async def test_embedding_saved_by_a_rank_is_loaded_by_all(engine, ranks, maker, host):
    for rank in ranks:
        prompt = maker.inline(pixels(300, 200, 70 + rank))
        expected = await answer(engine, prompt, rank=rank)
        before = await counted(engine)
        tokens, uses = await saved(engine, host, prompt, rank=rank)
        assert tokens == expected
        assert await since(engine, before) == EmbeddingCounts(encoded=1, saved=1)
        known = without_tensors(prompt, 0)
        assert [await answer(engine, known, uses, rank=r) for r in ranks] == [expected] * len(ranks)
        assert await since(engine, before) == EmbeddingCounts(loaded=len(ranks), encoded=1, saved=1)


async def test_an_embedding_is_saved_once_if_all_ranks_encode_its_item(engine, ranks, maker, host):
    """The store does not ask two requests for the same item; engines need not know that."""
    prompt = maker.inline(pixels(300, 200, 75))
    _, tensor = host.reserved(prompt.features[0])
    before = await counted(engine)
    use = EmbeddingUse(tensor, is_filled=False)
    tokens = await asyncio.gather(*(answer(engine, prompt, [use], rank=rank) for rank in ranks))
    assert tokens == [tokens[0]] * len(ranks)
    assert await since(engine, before) == EmbeddingCounts(encoded=len(ranks), saved=1)


async def test_embedding_that_cannot_be_read_fails_only_its_request_at_a_rank(engine, ranks, maker, host):
    prompt, last = maker.inline(pixels(300, 240, 77)), ranks[-1]
    expected, (use,) = await saved(engine, host, prompt, rank=0)
    other = maker.inline(pixels(300, 300, 78))
    undisturbed = await answer(engine, other, rank=last)
    innocent = asyncio.create_task(answer(engine, other, rank=last))
    known = without_tensors(prompt, 0)
    with pytest.raises(HandoverFailed):
        await answer(engine, known, [moved(use, generation=10**9)], rank=last)
    assert await innocent == undisturbed
    assert await answer(engine, known, [use], rank=last) == expected
