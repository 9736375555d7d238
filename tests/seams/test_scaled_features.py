"""`jpeg_scaled_decode` from the gateway's keys to the preparers' pixels, with the fake processor."""

from __future__ import annotations

import io
import os
import secrets
from contextlib import AsyncExitStack

import numpy as np
import pytest
from gateway_parts import UNCOUNTED, ScriptedFetcher, png, ref
from host_store import HostStore
from PIL import Image as PILImage

from medialane.core.media import MediaSize
from medialane.media import MediaConfig
from medialane.observability.timeline import StageTimeline
from medialane.prepare import PrepareConfig, PreparerPool

SHRINKS = b'{"shrinks":true}'


@pytest.fixture
def jpeg():
    file = io.BytesIO()
    PILImage.fromarray(np.full((1200, 2000, 3), (200, 100, 50), np.uint8)).save(file, "JPEG", quality=95)
    return file.getvalue()


@pytest.fixture
async def source_with(arena):
    """Make a feature source and preparers with these media settings."""
    stack = AsyncExitStack()

    async def make(**settings):
        media = MediaConfig(**settings)
        pool = PreparerPool(
            PrepareConfig(num_preparers=1, start_timeout_s=15),
            factory="medialane.testing.fake_processor:build_processor",
            factory_config=b"{}",
            arena=arena,
            media=media,
            environment=os.environ,
        )
        await pool.start()
        stack.push_async_callback(pool.close)
        store = await stack.enter_async_context(
            HostStore(arena, pool, ScriptedFetcher(), media=media, address=f"unix:/tmp/{secrets.token_hex(8)}.sock")
        )
        return store.features

    yield make
    await stack.aclose()


async def found(source, data, options):
    """The feature's hash, its reported sizes, and the shape of its first tensor."""
    if options is None:
        made = await source.decoded(ref(data), StageTimeline(), UNCOUNTED)
    else:
        made = await source.processed(ref(data), options, StageTimeline(), UNCOUNTED)
    made.hold.release()
    feature = made.value
    return feature.mm_hash, feature.size, feature.tensors[0].spec.shape


async def test_scaled_and_full_size_images_never_share_an_entry(source_with, jpeg):
    whole, scaling = await source_with(), await source_with(jpeg_scaled_decode=True)
    size = MediaSize(width=2000, height=1200)
    one = await found(whole, jpeg, SHRINKS)
    other = await found(scaling, jpeg, SHRINKS)
    assert one[1:] == (size, (1200, 2000, 3))
    assert other[1:] == (size, (150, 250, 3))
    assert one[0] != other[0]
    # Worker-side processing of the full-size image has the full-size key, from either gateway.
    content = (await source_content(whole, jpeg)).content_hash
    assert {s.key(ref(jpeg), SHRINKS, content=content) for s in (whole, scaling)} == {one[0]}


async def source_content(source, data):
    found = await source.encoded(ref(data), StageTimeline(), UNCOUNTED)
    found.hold.release()
    return found.value


async def test_unscaled_images_are_full_size_even_with_scaling_enabled(source_with, jpeg):
    scaling = await source_with(jpeg_scaled_decode=True)
    assert (await found(scaling, jpeg, b"{}"))[2] == (1200, 2000, 3)  # the processor does not report it
    assert (await found(scaling, png(90, 60), SHRINKS))[2] == (60, 90, 3)
    assert (await found(scaling, jpeg, None))[2] == (1200, 2000, 3)  # stage decoded
