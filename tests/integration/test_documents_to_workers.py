"""Pages of a document, from its bytes to what reaches an engine: rendered by preparers, kept by the store."""

from __future__ import annotations

import asyncio
import io
import os
from contextlib import aclosing

import numpy as np
import pypdfium2
import pytest
from gateway_parts import Parts
from msgspec import json
from msgspec.structs import replace
from PIL import Image as PILImage

from medialane.gateway import GatewayConfig, open_scope
from medialane.media import MediaConfig
from medialane.prepare import PrepareConfig, PreparerPool
from medialane.testing.fake_processor import PLACEHOLDER_TOKEN, FakeAssembler
from medialane.testing.sample_media import sample_pdf
from medialane.types.errors import (
    InvalidDocument,
    PreparationFailed,
    TooManyPages,
    Unavailable,
    UnknownMediaUuid,
    UnsupportedMediaType,
)
from medialane.types.feature import MediaPrompt
from medialane.types.hashing import content_hash
from medialane.types.media import PDF_TYPE, DocumentOptions, MediaRef
from pdf_maker import IMAGE, bomb, with_image

FAST = {"reconnect_initial_s": 0.01, "reconnect_max_s": 0.05}
PARAM = "messages[0].content[0].file"
URL = "http://host/paper.pdf"
TEXTS = ("first page", "second page\nwith two lines", "third page")
#: Small pages, to save time.
SMALL = DocumentOptions(dpi=36)


@pytest.fixture
async def seen(worker):
    """Records each request at the engine with the bytes of its items."""
    seen, generate = [], worker.engine.generate

    async def spied(request, tensors, embeddings):
        seen.append((request.prompt, [[bytes(tensor) for tensor in each] for each in tensors]))
        async with aclosing(generate(request, tensors, embeddings)) as deltas:
            async for delta in deltas:
                yield delta

    worker.engine.generate = spied
    return seen


def document(texts=TEXTS, **fields):
    return MediaRef("image", PARAM, data=sample_pdf(texts), media_type=PDF_TYPE, **fields)


def pages(ref, opened):
    """As intake makes them."""
    own = {"content": opened.content_hash}
    return [replace(ref, param=f"{PARAM}.{p.io.page}", io=json.encode(p.io), **own) for p in opened.pages]


def prompt(refs):
    return MediaPrompt([1] + [token for _ in refs for token in (2, PLACEHOLDER_TOKEN)], tuple(refs))


def rendered(data, number, dpi=36):
    """The page by pypdfium2's own means."""
    with pypdfium2.PdfDocument(data) as document:
        page = document[number - 1]
        pixels = page.render(scale=dpi / 72, rev_byteorder=True).to_numpy().copy()
        page.close()
    return pixels


async def ask(parts, ref, options=SMALL):
    """Answer a request about a document; return what was opened, and the cache's part in it."""
    opened = await parts.store_items.open_document(ref, options)
    with open_scope() as scope:
        await parts.answer(prompt(pages(ref, opened)))
    return opened, scope.timeline


async def test_pages_are_pypdfium2s_pixels_in_every_stage(arena, preparers, worker, seen):
    ref = document()
    expected = [rendered(ref.data, number) for number in (1, 2, 3)]
    for stage in ("features", "decoded", "url"):
        async with Parts(arena, preparers, [worker], config=GatewayConfig(stage=stage, **FAST)) as parts:
            opened, _ = await ask(parts, ref)
        assert [page.text for page in opened.pages] == list(TEXTS)
        assert [(page.io.height, page.io.width) for page in opened.pages] == [pixels.shape[:2] for pixels in expected]
    (features, _), (decoded, pixels), (url, files) = seen
    assert [feature.size.width for feature in features.features] == [page.io.width for page in opened.pages]
    assert [one for (one,) in pixels] == [one.tobytes() for one in expected]
    for (file,), item, one in zip(files, url.media, expected, strict=True):
        assert (item.media_type, item.io) == ("image/png", b"{}")
        assert np.array_equal(np.asarray(PILImage.open(io.BytesIO(file))), one)
    assert (
        [i.mm_hash for i in url.media] == [i.mm_hash for i in decoded.media] == [f.mm_hash for f in features.features]
    )


async def test_second_turn_renders_nothing_and_asks_no_preparer(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        first, timeline = await ask(parts, document())
        assert timeline.cache == "miss"
        num_done = preparers.stats().num_done
        again, timeline = await ask(parts, document())
        assert (again, timeline.cache, timeline.copied_bytes) == (first, "hit", 0)
        assert preparers.stats().num_done == num_done == 4


@pytest.mark.parametrize("stage", ["features", "decoded", "url"])
async def test_second_turn_asks_the_store_once_for_any_number_of_pages(arena, preparers, worker, stage):
    async with Parts(arena, preparers, [worker], config=GatewayConfig(stage=stage, **FAST)) as parts:
        first, _ = await ask(parts, document())
        before = parts.store.link.num_calls
        assert (await ask(parts, document()))[0] == first
        assert parts.store.link.num_calls - before == 1


async def test_document_is_opened_anew_for_other_options_and_another_salt(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        for ref, options in ((document(), SMALL), (document(), DocumentOptions(dpi=48)), (document(salt="b"), SMALL)):
            before = parts.store.link.num_calls
            opened = [await parts.store_items.open_document(ref, options) for _ in range(2)]
            assert parts.store.link.num_calls - before == 1
            assert opened[0] == opened[1]


async def test_document_is_opened_anew_once_the_store_says_that_another_release_has_opened_it(
    arena, preparers, worker, monkeypatch
):
    async with Parts(arena, preparers, [worker]) as parts:
        opened, _ = await ask(parts, document())
        stale = replace(opened.pages[0].io, renderer="pdfium-1", width=opened.pages[0].io.width + 1)
        page = replace(pages(document(), opened)[0], io=json.encode(stale))
        with open_scope(), pytest.raises(Unavailable, match="send the request again"):
            await parts.answer(prompt([page]))
        before = parts.store.link.num_calls
        await parts.store_items.open_document(document(), SMALL)
        assert parts.store.link.num_calls - before == 1


async def test_only_the_new_page_of_another_edition_is_rendered(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        await ask(parts, document())
        num_done = preparers.stats().num_done
        opened, timeline = await ask(parts, document(("an inserted page", *TEXTS)))
        assert (len(opened.pages), timeline.num_hits, timeline.num_misses) == (4, 3, 1)
        assert preparers.stats().num_done == num_done + 2


async def test_document_of_a_url_is_fetched_once(arena, preparers, worker):
    ref = MediaRef("image", PARAM, url=URL, media_type=PDF_TYPE)
    async with Parts(arena, preparers, [worker]) as parts:
        parts.fetcher.contents[URL] = sample_pdf(TEXTS)
        await ask(parts, ref)
        assert parts.fetcher.num_fetches == 1
        parts.fetcher.fresh[URL] = content_hash(sample_pdf(TEXTS))
        assert (await ask(parts, ref))[1].cache == "hit"
        assert parts.fetcher.num_fetches == 1


async def test_concurrent_requests_share_opening_and_rendering(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        await asyncio.gather(*(parts.store_items.open_document(document(), SMALL) for _ in range(5)))
        assert preparers.stats().num_done == 1


async def test_tenants_share_neither_document_nor_pages(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        await ask(parts, document())
        num_done = preparers.stats().num_done
        _, timeline = await ask(parts, document(salt="another"))
        assert timeline.cache == "miss"
        assert preparers.stats().num_done == 2 * num_done


async def test_options_choose_pages_and_their_pixels(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        opened, _ = await ask(parts, document(), DocumentOptions(pages="3,1-2,2", max_pixels=10_000, text=False))
        assert [(page.io.page, page.text) for page in opened.pages] == [(1, ""), (2, ""), (3, "")]
        assert all(9_000 < page.io.width * page.io.height <= 10_000 for page in opened.pages)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        (DocumentOptions(), (168, 237)),  # 40,000 pixels of A4
        (DocumentOptions(dpi=36), (298, 421)),
        (DocumentOptions(max_pixels=250_000), (420, 594)),
    ],
)
async def test_page_has_twice_the_pixels_that_the_model_uses_unless_the_request_says(
    arena, preparers, worker, options, size
):
    async with Parts(arena, preparers, [worker], assembler=FakeAssembler(used_pixels=20_000)) as parts:
        with open_scope():
            opened = await parts.gateway.open_document(document(), options)
    assert [(page.io.width, page.io.height) for page in opened.pages] == [size] * len(TEXTS)


async def test_page_has_the_operators_resolution_if_it_is_not_known_what_the_model_uses(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope():
            opened = await parts.gateway.open_document(document(), DocumentOptions(pages="1"))
    assert [(page.io.width, page.io.height) for page in opened.pages] == [(1190, 1684)]


async def test_errors_name_the_document(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        for data, options, kind in (
            (b"%PDF-1.7 nothing", SMALL, InvalidDocument),
            (b"<html>", SMALL, UnsupportedMediaType),
            (sample_pdf(TEXTS), DocumentOptions(max_pages=2), TooManyPages),
        ):
            with pytest.raises(kind) as raised:
                await parts.store_items.open_document(MediaRef("image", PARAM, data=data, media_type=PDF_TYPE), options)
            assert raised.value.param == PARAM


async def test_document_sent_as_an_image_is_refused_with_advice_whether_or_not_it_is_cached(arena, preparers, worker):
    as_image = MediaRef("image", PARAM, data=sample_pdf(TEXTS))
    async with Parts(arena, preparers, [worker]) as parts:
        for _ in range(2):
            with open_scope(), pytest.raises(UnsupportedMediaType, match="send it as a document"):
                await parts.answer(prompt([as_image]))
            await ask(parts, document())


async def test_page_that_takes_too_long_costs_its_own_request_alone(arena, worker):
    hangs = with_image(bomb(IMAGE, bytes(32 << 20)))
    pool = PreparerPool(
        PrepareConfig(num_preparers=1, image_timeout_s=0.5, start_timeout_s=15),
        factory="medialane.testing.fake_processor:build_processor",
        factory_config=b"{}",
        arena=arena,
        media=MediaConfig(),
        environment=os.environ,
    )
    await pool.start()
    try:
        async with Parts(arena, pool, [worker]) as parts:
            with pytest.raises((PreparationFailed, Unavailable)):
                await ask(parts, MediaRef("image", PARAM, data=hangs, media_type=PDF_TYPE))
            assert (await ask(parts, document()))[1].cache == "miss"
    finally:
        await pool.close()


async def test_page_that_is_not_cached_needs_the_documents_bytes(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        opened = await parts.store_items.open_document(document(), SMALL)
        arena.evict(opened.content_hash, "encoded")
        page, *_ = pages(document(), opened)
        with open_scope(), pytest.raises(UnknownMediaUuid):
            await parts.answer(prompt([replace(page, data=None)]))
        with open_scope():
            await parts.answer(prompt([page]))
