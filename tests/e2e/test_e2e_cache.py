"""Nothing is processed twice, as shown by Server-Timing, /metrics and vLLM's prefix cache."""

import asyncio

import pytest
from openai_http import chat, image, long_chat, photo, picture, text
from picture_server import picture_server

from waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.thread]

ASK = text("What is in the picture?")


async def test_repeated_image_is_not_decoded_processed_or_copied_again(ours):
    first = await ours.succeed(chat(picture(20), ASK))
    assert first.cache == "miss"
    assert {"decode", "process"} <= first.steps.keys()
    again = await ours.succeed(chat(picture(20), text("Another question.")))
    assert again.cache == "hit"
    assert again.copied_bytes == 0
    assert not {"decode", "process"} & again.steps.keys()


async def test_same_image_inline_and_by_url_shares_one_entry(ours):
    entries = "medialane_arena_entries"
    before = (await ours.metrics()).value(entries)
    by_data = await ours.succeed(chat(picture(21), ASK))
    async with picture_server({"a": photo(21), "b": photo(21)}, cache_control="max-age=60") as server:
        by_url = await ours.succeed(chat(image(server.url("a")), ASK))
        elsewhere = await ours.succeed(chat(image(server.url("b")), ASK))
        fetched_again = await ours.succeed(chat(image(server.url("a")), ASK))
        assert server.num_requests == {"a": 1, "b": 1}
    assert [found.cache for found in (by_data, by_url, elsewhere, fetched_again)] == ["miss", "hit", "hit", "hit"]
    assert by_data.ids == by_url.ids == elsewhere.ids == fetched_again.ids
    assert (await ours.metrics()).value(entries) == before + 3  # the encoded bytes, the feature and its embedding


async def test_one_request_may_mix_new_and_cached_images(ours):
    await ours.succeed(chat(picture(22), ASK))
    assert (await ours.succeed(chat(picture(22), picture(23), ASK))).cache == "mixed"


async def test_text_request_does_not_touch_the_media_cache(ours):
    assert (await ours.succeed(chat(ASK))).cache == "none"


async def test_image_in_concurrent_requests_is_processed_once(ours):
    jobs = "medialane_preparer_jobs_total"
    before = (await ours.metrics()).value(jobs, outcome="done")
    answers = await asyncio.gather(*(ours.succeed(chat(picture(24), ASK)) for _ in range(4)))
    assert len({tuple(answer.ids) for answer in answers}) == 1
    assert (await ours.metrics()).value(jobs, outcome="done") == before + 1


async def test_repeated_prompt_hits_vllms_prefix_cache(ours):
    """One request more than there are workers: one worker receives it twice, however they are chosen."""
    answers = [await ours.succeed(chat(picture(25), ASK)) for _ in range(3)]
    cached = [(answer.json["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) for answer in answers]
    assert cached[0] == 0
    assert max(cached) > 0
    assert len({tuple(answer.ids) for answer in answers}) == 1


async def test_cache_salt_isolates_entries(ours):
    await ours.succeed(chat(picture(26), ASK, cache_salt="one tenant"))
    assert (await ours.succeed(chat(picture(26), ASK, cache_salt="another"))).cache == "miss"
    assert (await ours.succeed(chat(picture(26), ASK, cache_salt="one tenant"))).cache == "hit"


async def test_metrics_cover_stages_caches_arena_and_processes(ours):
    await ours.succeed(chat(picture(27), ASK))
    await eventually(lambda: is_idle(ours), "the worker has released", 20)
    page = await ours.metrics()
    for step in ("intake", "fetch", "decode", "process", "route", "handover", "queue", "prefill", "first_token"):
        assert page.value("medialane_stage_seconds_count", stage=step) > 0, step
    assert page.value("medialane_cache_lookups_total", kind="feature", outcome="miss") > 0
    assert page.value("medialane_arena_bytes", kind="size") == pytest.approx(256 << 20, rel=0.01)
    assert page.value("medialane_arena_bytes", kind="cached") > 0
    assert page.value("medialane_preparers", state="alive") == 2
    assert list(page.by("medialane_worker_in_flight", "worker").values()) == [0, 0]
    assert page.value("medialane_worker_state", state="ready") == 2
    assert page.value("medialane_transfer_fallbacks_total") == 0


async def test_client_disconnect_leaves_no_hold_and_no_running_request(ours):
    body = long_chat(picture(28), text("Tell a long story."), stream=True)
    await eventually(lambda: is_idle(ours), "nothing else runs", 20)
    async with ours.opened(body) as response:
        await response.content.readline()
        page = await ours.metrics()
        assert page.value("medialane_arena_leases") > 0
        assert page.value("medialane_worker_in_flight") == 1
    await eventually(lambda: is_idle(ours), "the request's hold and its engine's work have ended", 30)
    assert (await ours.succeed(chat(picture(28), ASK))).cache == "hit"


async def test_client_disconnect_before_the_response_leaks_nothing(ours):
    body = long_chat(picture(29), text("Tell a long story."))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5), ours.opened(body):
            pass
    await eventually(lambda: is_idle(ours), "the request has ended", 30)


async def is_idle(ours) -> bool:
    """No request runs and nothing is held."""
    page = await ours.metrics()
    held = ("medialane_arena_leases", "medialane_worker_in_flight", "medialane_worker_running")
    return all(page.value(name) == 0 for name in held)
