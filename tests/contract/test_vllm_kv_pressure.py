"""A separate engine with a small KV cache: evictions are reported, and a new engine reports from its start."""

from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from kv_watch import BLOCK, Watched, expanded, predicted, start_engine, text
from prompt_maker import PromptMaker, pixels

from medialane.types.kv_blocks import BlockRemoved, BlockStored
from waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def maker(renderer):
    return PromptMaker(renderer)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small(tiny_model):
    engine = start_engine(tiny_model, "--num-gpu-blocks-override=24", "--max-model-len=1024")
    found = Watched(engine)
    yield found
    await engine.close()
    assert not Path(engine.events.config.endpoint.removeprefix("ipc://")).parent.exists()


async def test_evicted_blocks_are_removed_as_in_the_engine(small, maker):
    """Every prompt's cached tokens equal the table's prediction while blocks are stored and evicted."""
    pictures = [pixels(280, 280, seed) for seed in range(3)]
    prompts = [expanded(maker, text(BLOCK, i % 2), pictures[i % 3], text(4 * BLOCK, i)) for i in range(12)]
    random = np.random.default_rng(5)
    for number in random.integers(0, len(prompts), 40):
        prompt = prompts[number]
        ids = predicted(prompt).tolist()
        held = set(small.table.held())
        expected = next((i for i, found in enumerate(ids) if found not in held), len(ids)) * BLOCK
        first = await small.run(prompt)
        assert first.num_cached_tokens == min(expected, (len(prompt.token_ids) - 1) // BLOCK * BLOCK)
        await eventually(lambda ids=ids: set(ids) <= set(small.table.held()))
    assert small.engine.card.num_kv_blocks == 24
    assert len(small.table.held()) < 24
    assert sum(len(event.block_hashes) for event in small.events if isinstance(event, BlockRemoved)) > 10
    assert small.table.num_faults == 0


async def test_new_engine_reports_from_its_start(small):
    """Its batches are counted from 0 again, by another reader."""
    assert small.engine.events.ranks[0].num_lost == 0
    assert isinstance(small.events[0], BlockStored)
