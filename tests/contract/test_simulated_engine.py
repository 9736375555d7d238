"""A simulated engine and a live vLLM: the same sequence of requests leaves the same blocks in their caches.

Outputs have one token where ids are compared: a simulated engine cannot predict the model's output.
"""

import itertools
from contextlib import aclosing

import numpy as np
import pytest
import pytest_asyncio
from kv_watch import BLOCK, Watched, expanded, start_engine
from prompt_maker import PromptMaker, bytes_of, encoded, pixels

from medialane.testing.simulated import SimulatedConfig, SimulatedEngine
from medialane.types.kv_blocks import BlockRemoved, BlockStored
from medialane.types.request import EngineRequest
from waiting import comes_true

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

_ids = itertools.count()


def text(num_tokens, seed=0):
    """Ordinary ids of the tiny model's vocabulary."""
    return np.random.default_rng(seed).integers(100, 500, num_tokens).tolist()


class Pair:
    """A live engine and a simulated one with its sizes."""

    def __init__(self, live):
        self.live = Watched(live)
        card = live.card
        config = SimulatedConfig(
            speedup=1e6,
            block_size=card.block_size,
            num_kv_blocks=card.num_kv_blocks,
            max_model_len=card.max_model_len,
            max_num_seqs=card.max_num_seqs,
            max_num_batched_tokens=card.max_num_batched_tokens,
            encoder_cache_tokens=card.encoder_cache_tokens,
        )
        config.validate()
        self.simulated = Watched(SimulatedEngine(config, model=card.model))

    async def run(self, prompt, **params):
        """Both engines' outputs, and what each stored and removed: (stored, removed) in numbers of blocks."""
        await self._settle()
        counts = [self._counts(watched) for watched in self._both]
        outputs = [await _ask(watched.engine, prompt, **params) for watched in self._both]
        await self._settle()
        after = [self._counts(watched) for watched in self._both]
        return outputs, [tuple(a - b for a, b in zip(*pair, strict=True)) for pair in zip(after, counts, strict=True)]

    async def _settle(self):
        """Events of the live engine are asynchronous: wait until it has reported as much as the simulated one."""
        # If it never has, the test compares them and reports the differences.
        await comes_true(lambda: self._counts(self.live) == self._counts(self.simulated))

    @property
    def _both(self):
        return self.live, self.simulated

    @staticmethod
    def _counts(watched):
        return tuple(
            sum(len(e.block_hashes) for e in watched.events if isinstance(e, kind))
            for kind in (BlockStored, BlockRemoved)
        )


async def _ask(engine, prompt, **params):
    """The first output."""
    sent = EngineRequest(f"pair-{next(_ids)}", prompt, encoded(**{"max_tokens": 1} | params))
    async with aclosing(engine.generate(sent, bytes_of(prompt))) as deltas:
        first, *_ = [delta async for delta in deltas]
    return first


@pytest.fixture(scope="module")
def maker(renderer):
    return PromptMaker(renderer)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(tiny_model):
    live = start_engine(
        tiny_model, "--num-gpu-blocks-override=24", "--max-model-len=1024", "--max-num-batched-tokens=384"
    )
    found = Pair(live)
    yield found
    await found.simulated.engine.close()
    await live.close()


async def test_equal_requests_leave_equal_blocks_under_kv_pressure(pair, maker):
    """Texts and images with shared prefixes, more than the cache holds, in chunks smaller than a prompt."""
    pictures = [pixels(280, 280, seed) for seed in range(3)]
    prompts = [expanded(maker, text(BLOCK, i % 2), pictures[i % 3], text(2 * BLOCK, i)) for i in range(8)]
    prompts += [expanded(maker, text(BLOCK * (i + 1) + 17 * i, i % 2)) for i in range(6)]
    prompts += [expanded(maker, text(40), pictures[0], text(30), pictures[0], pictures[i], text(90)) for i in range(3)]
    for number in np.random.default_rng(7).integers(0, len(prompts), 60):
        (live, simulated), changes = await pair.run(prompts[number])
        assert simulated.num_cached_tokens == live.num_cached_tokens
        assert changes[0] == changes[1]
        assert set(pair.simulated.table.held()) == set(pair.live.table.held())
    assert sum(isinstance(event, BlockRemoved) for event in pair.live.events) > 20
    assert pair.live.table.num_faults == pair.simulated.table.num_faults == 0


@pytest.mark.parametrize("num_tokens", [100, 129, 200])
async def test_outputs_fill_the_same_number_of_blocks(pair, maker, num_tokens):
    prompt = expanded(maker, text(250, 100 + num_tokens))
    _, changes = await pair.run(prompt, max_tokens=num_tokens)
    assert changes[0] == changes[1]
    assert changes[0][0] == (250 + num_tokens - 1) // BLOCK
