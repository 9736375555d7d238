"""Prompts that are only described, by a real store and preparers, which measure and process blanks and nothing else."""

from __future__ import annotations

import pytest
from gateway_parts import Parts, png, prompt

from medialane.gateway import open_scope
from medialane.types.errors import InvalidImage, PromptTooLong


async def described(parts, media):
    with open_scope():
        return await parts.gateway.describe(media)


def comparable(prepared):
    """What is equal whether an item was prepared or described."""
    return prepared.token_ids, prepared.mm_hashes, [(p.placeholder, p.feature.header) for p in prepared.features]


async def test_described_prompt_equals_the_prepared_one_and_leaves_nothing_in_the_arena(arena, preparers, worker):
    media = prompt(png(60, 40, 1), png(90, 70, 2), png(60, 40, 3))
    async with Parts(arena, preparers, [worker]) as parts:
        found = await described(parts, media)
        assert found.is_predicted
        assert (arena.stats().num_entries, parts.num_held) == (0, 0)
        with open_scope():
            prepared = await parts.gateway.prepare(media)
            assert not prepared.is_predicted
            assert comparable(found) == comparable(prepared)


async def test_items_whose_headers_have_content_are_prepared(arena, preparers, worker):
    media = prompt(png(60, 40, 1), options=b'{"by_content":true}')
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope():
            found = await parts.gateway.describe(media)
            assert not found.is_predicted
            assert comparable(found) == comparable(await parts.gateway.prepare(media))


async def test_items_that_are_refused_are_refused_as_in_an_answer(arena, preparers, worker):
    async with Parts(arena, preparers, [worker], max_tokens=20) as parts:
        with pytest.raises(InvalidImage):
            await described(parts, prompt(b"no image"))
        with pytest.raises(InvalidImage, match="rejects"):
            await described(parts, prompt(png(), options=b'{"fault":"reject"}'))
        with pytest.raises(PromptTooLong):
            await described(parts, prompt(png(600, 400)))
