"""Every stage and transport gives the same outputs over the same two workers, by the requested hand-over path."""

import pytest
from openai_http import assert_same, chat, data_url, image, photo, picture, text, video

from waiting import eventually

pytestmark = pytest.mark.vllm

ASK = text("Describe the picture.")
HANDOVER_PATHS = ("features/shm", "features/inline", "decoded/shm", "url", "apart", "features/tcp", "decoded/tcp")

BODIES = {
    "text": chat(text("Say something about pictures.")),
    "one image": chat(picture(80), ASK),
    "three images": chat(picture(80), text("and"), picture(81, 1024, 768), picture(82, 200, 300), ASK),
    "video": chat(text("Look at"), video(80), ASK),
    "image and video": chat(picture(80), video(81, fps=2), ASK, media_io_kwargs={"video": {"num_frames": 6}}),
    "two choices with logprobs": chat(picture(80), ASK, n=2, temperature=0.8, seed=7, logprobs=True, top_logprobs=2),
}


@pytest.mark.parametrize("way", HANDOVER_PATHS)
@pytest.mark.parametrize("name", BODIES)
async def test_output_equals_plain_vllm(gateways, plain, way, name):
    answer, right = await gateways[way].succeed(BODIES[name]), await plain.succeed(BODIES[name])
    assert answer.ids
    assert_same(answer.json, right.json)
    details = [found.json["usage"]["prompt_tokens_details"] or {} for found in (answer, right)]
    assert details[0].get("multimodal_tokens") == details[1].get("multimodal_tokens")


@pytest.mark.parametrize("way", HANDOVER_PATHS)
async def test_beam_search_equals_plain_vllm(gateways, plain, way):
    """`usage` differs if the worker expands the prompt."""
    body = chat(picture(83), ASK, use_beam_search=True, n=3, max_tokens=5)
    answer, right = await gateways[way].succeed(body), await plain.succeed(body)
    beams = [
        [(choice["token_ids"], choice["message"]["content"]) for choice in a.json["choices"]] for a in (answer, right)
    ]
    assert beams[0] == beams[1]


@pytest.mark.parametrize("way", HANDOVER_PATHS)
async def test_streamed_and_repeated_outputs_equal_the_first(gateways, plain, way):
    answers = [
        await gateways[way].succeed({**BODIES["one image"], "stream": stream}) for stream in (False, True, False)
    ]
    right = await plain.succeed(BODIES["one image"])
    assert [answer.ids for answer in answers] == [right.ids] * 3


@pytest.mark.parametrize("way", [way for way in HANDOVER_PATHS if way != "apart"])
@pytest.mark.parametrize("options", [{"patch_size": 1}, {"merge_size": 4}, {"merge_size": 0}], ids=str)
async def test_options_that_would_crash_an_engine_are_client_errors_on_every_path(
    gateways, worker_addresses, serve, way, options
):
    workers = [serve.worker_pid(address) for address in worker_addresses]
    answer = await gateways[way].post(chat(picture(86), ASK, mm_processor_kwargs=options))
    assert answer.status == 400, answer
    assert (await gateways[way].metrics()).value("medialane_transfer_fallbacks_total") == 0
    assert (await gateways[way].succeed(chat(picture(86), ASK))).ids
    assert [serve.worker_pid(address) for address in worker_addresses] == workers


async def test_shared_memory_transfers_a_cached_image_without_copying(gateways):
    client = gateways["features/shm"]
    await client.succeed(chat(picture(83), ASK))
    again = await client.succeed(chat(picture(83), ASK))
    assert (again.cache, again.copied_bytes) == ("hit", 0)
    assert (await client.metrics()).value("medialane_transfer_fallbacks_total") == 0


async def test_inline_sends_features_in_the_message(gateways):
    client = gateways["features/inline"]
    await client.succeed(chat(picture(83), ASK))
    again = await client.succeed(chat(picture(83), ASK))
    assert again.cache == "hit"
    assert again.copied_bytes > 512 * 384 * 3  # the patches of all pixels
    assert (await client.metrics()).value("medialane_transfer_fallbacks_total") == 0


async def test_decoded_stage_sends_pixels_through_shared_memory(gateways):
    client = gateways["decoded/shm"]
    first, again = [await client.succeed(chat(picture(84), ASK)) for _ in range(2)]
    assert first.copied_bytes == len(photo(84)) + 512 * 384 * 3
    assert (again.cache, again.copied_bytes) == ("hit", 0)
    assert (await client.metrics()).value("medialane_transfer_fallbacks_total") == 0


async def test_url_stage_sends_the_encoded_image_through_shared_memory_without_preparing(gateways):
    client = gateways["url"]
    before = await client.metrics()
    first, again = [await client.succeed(chat(picture(87), ASK)) for _ in range(2)]
    assert (first.copied_bytes, again.copied_bytes) == (len(photo(87)), 0)
    page = await client.metrics()
    assert page.value("medialane_preparer_jobs_total") == before.value("medialane_preparer_jobs_total")
    assert page.value("medialane_transfer_fallbacks_total") == 0


async def test_without_shared_memory_small_features_go_inline_and_large_ones_as_encoded_image(gateways):
    client = gateways["apart"]
    small = await client.succeed(chat(picture(85, 112, 112), ASK))
    assert small.copied_bytes < 1 << 20
    before = (await client.metrics()).value("medialane_transfer_fallbacks_total", path="features/inline")
    large = await client.succeed(chat(picture(86, 1024, 768), ASK))
    assert large.ids
    page = await client.metrics()
    assert (
        page.value("medialane_transfer_fallbacks_total", path="features/inline", reason="handover_failed") == before + 1
    )
    assert page.value("medialane_transfer_fallbacks_total", path="features/shm") == 0


@pytest.mark.parametrize("way", ["features/tcp", "decoded/tcp"])
async def test_store_of_the_workers_host_copies_media_once(gateways, way):
    """The gateway's store is another one: the workers' store copies from it, and keeps the copy for later requests."""
    client = gateways[way]

    async def num_pulls() -> float:
        return (await gateways["features/shm"].metrics()).value("medialane_store_pulls_total", mover="tcp")

    before = await num_pulls()
    first, again = [await client.succeed(chat(picture(89), ASK)) for _ in range(2)]
    assert first.ids == again.ids
    assert (await num_pulls()) == before + 1
    assert (await client.metrics()).value("medialane_transfer_fallbacks_total") == 0


@pytest.mark.parametrize("way", HANDOVER_PATHS)
async def test_invalid_image_error_names_its_field(gateways, way):
    answer = await gateways[way].post(chat(ASK, image(data_url(photo(80)[:5000]))))
    assert (answer.status, answer.error["code"]) == (400, "invalid_image")
    assert answer.error["param"] == "messages[0].content[1].image_url"
    assert (await gateways[way].succeed(BODIES["one image"])).ids


async def test_second_gateway_finds_what_the_first_has_prepared(gateways):
    first, second = gateways["features/shm"], gateways["features/inline"]
    right = await first.succeed(chat(picture(88), ASK))
    jobs = (await first.metrics()).value("medialane_preparer_jobs_total")
    again = await second.succeed(chat(picture(88), ASK))
    assert (right.cache, again.cache, again.ids) == ("miss", "hit", right.ids)
    assert (await second.metrics()).value("medialane_preparer_jobs_total") == jobs


@pytest.mark.parametrize("way", HANDOVER_PATHS)
async def test_idle_server_holds_no_leases(gateways, way):
    async def is_idle() -> bool:
        page = await gateways[way].metrics()
        in_flight = sum(page.by("medialane_worker_in_flight", "worker").values())
        return (page.value("medialane_arena_leases"), in_flight) == (0, 0)

    await eventually(is_idle, "the last worker has released", 10)
