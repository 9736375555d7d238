"""An engine whose KV events are recorded, and prompts with predicted blocks."""

from contextlib import aclosing

import numpy as np
import pytest
from prompt_maker import bytes_of, encoded

from medialane.types.feature import MediaPayload, MediaSpan
from medialane.types.kv_blocks import prompt_block_ids
from medialane.types.media import Image
from medialane.types.request import EngineRequest, ExpandedPrompt
from medialane.worker.block_table import BlockTable
from waiting import comes_true

DEADLINE_S = 20.0
BLOCK = 128  # of vLLM on CPUs

_ids = iter(range(10**6))


class Watched:
    """An engine and the state according to its events."""

    def __init__(self, engine):
        self.engine = engine
        self.events = []
        self.table = BlockTable(engine.card.block_size, max_blocks=engine.card.num_kv_blocks)
        engine.watch_blocks(self._heard)

    def _heard(self, batch):
        self.events += batch.events
        self.table.apply(batch.events)

    async def reset(self):
        """Clear the cache; vLLM reports it only with its next step."""
        assert await self.engine.llm.reset_prefix_cache()
        del self.events[:]

    async def run(self, prompt, *, params=None, **fields):
        sent = EngineRequest(f"kv-{next(_ids)}", prompt, encoded(max_tokens=1, **(params or {})), **fields)
        async with aclosing(self.engine.generate(sent, bytes_of(prompt))) as deltas:
            first, *_ = [delta async for delta in deltas]
        return first

    async def holds(self, ids):
        """Wait until exactly these blocks are held."""
        expected = {int(found) for found in ids}
        return await comes_true(lambda: set(self.table.held()) == expected) and self.table.num_faults == 0


def text(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(10, 200, num_tokens).tolist()


def expanded(maker, *parts):
    """A prompt of token ids (lists) and images (arrays), in this order, with features by value."""
    (start, pad, end) = maker.tokenizer.encode("<|vision_start|><|image_pad|><|vision_end|>")
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    token_ids = [t for part in parts for t in ([start, pad, end] if isinstance(part, np.ndarray) else part)]
    items = [maker.processor.process(Image(array), b"{}") for array in arrays]
    keys = [f"{int(array.astype(np.int64).sum()):064x}" for array in arrays]
    features = tuple(MediaPayload("image", k, i.header, (), i.size) for k, i in zip(keys, items, strict=True))
    assembled = maker.assembler.assemble(token_ids, features, b"{}")
    handed = [
        MediaPayload("image", key, item.header, maker.by_value(item, key), item.size, place)
        for key, item, place in zip(keys, items, assembled.placeholders, strict=True)
    ]
    return ExpandedPrompt(assembled.token_ids, tuple(handed))


def spans(prompt):
    return [
        MediaSpan(m.mm_hash, m.placeholder.offset, m.placeholder.length, m.modality, m.placeholder.num_embeds)
        for m in prompt.media
    ]


def predicted(prompt, **fields):
    return prompt_block_ids(prompt.token_ids, block_size=BLOCK, media=spans(prompt), **fields)


def start_engine(model, *args):
    """A real engine with these flags of vLLM."""
    from medialane.config import vllm_defaults
    from medialane.vllm_bridge.engine.engine import build_engine

    args = ["--enforce-eager", "--skip-mm-profiling", '--limit-mm-per-prompt={"image":8}', *args]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_defaults(str(model), args, on_gpu=False, num_workers=1).items():
            patch.setenv(name, value)
        # A forked EngineCore would inherit our "warnings are errors".
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        return build_engine(str(model), args)
