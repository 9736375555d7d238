"""An image is encoded once for both workers, as the engines count it, and the answers are plain vLLM's."""

import asyncio
import json

import pytest
from embedding_requests import Engines, ask, at_both_workers, evict, evict_unheld, nothing_is_held
from openai_http import chat, in_flight, load, long_chat, picture, text, video
from process_tree import descendants, suspended

from host_state import store_link
from waiting import eventually

pytestmark = pytest.mark.vllm

ASK = text("What is in the picture?")
EVICTED_S = 0.5


@pytest.fixture
async def store(serve):
    async with store_link(serve.store_address) as link:
        yield link


@pytest.fixture
def engines(metrics_port):
    return Engines(metrics_port)


async def test_new_image_is_encoded_once_and_known_to_both_workers(ours, plain, serve, engines):
    before = await engines.counts()
    first = await ask(ours, picture(700), ASK)
    assert first.outcomes == ["encoded"]
    assert first.answer.ids == (await plain.succeed(chat(picture(700), ASK))).ids
    assert await engines.counts() == [before[0] + 1, before[1]]
    found = await at_both_workers(ours, picture(700), ASK)
    assert [each.outcomes for each in found.values()] == [["loaded"]] * 2
    assert (await engines.counts())[0] == before[0] + 1


async def test_answers_by_embeddings_equal_plain_vllm(ours, plain):
    await ask(ours, picture(701), ASK)
    for number in range(4):
        content = (text(f"Question {number}:"), picture(701), ASK)
        found = await ask(ours, *content)
        assert found.outcomes == ["loaded"]
        assert found.answer.ids == (await plain.succeed(chat(*content))).ids


async def test_one_of_two_images_is_known(ours, plain, engines):
    await ask(ours, picture(702), ASK)
    before = await engines.counts()
    content = (text("Compare"), picture(702), text("and"), picture(703), ASK)
    found = await ask(ours, *content)
    assert found.outcomes == ["loaded", "encoded"]
    assert found.answer.ids == (await plain.succeed(chat(*content))).ids
    assert (await engines.counts())[0] == before[0] + 1  # the known one may be in the engine's own encoder cache


async def test_video_is_encoded_once(ours, plain):
    options = {"media_io_kwargs": {"video": {"num_frames": 4}}}
    for question, expected in (("What happens?", "encoded"), ("Once more, what happens?", "loaded")):
        content = (text(question), video(3))
        found = await ask(ours, *content, **options)
        assert found.outcomes == [expected]
        assert found.answer.ids == (await plain.succeed(chat(*content, **options))).ids


async def test_evicted_embedding_is_made_again(ours, plain, serve, store, engines):
    await ask(ours, picture(704), ASK)
    await evict(serve, store)
    before = await engines.counts()
    content = (text("Again:"), picture(704), ASK)
    found = await ask(ours, *content)
    assert found.answer.ids == (await plain.succeed(chat(*content))).ids
    assert found.outcomes in (["encoded"], ["unkept"])
    assert (await engines.counts())[1] == before[1]


async def test_eviction_between_routing_and_load_spares_what_is_to_be_loaded(ours, plain, serve, store, engines):
    """What is evicted is overwritten: an embedding that nobody held would give another answer."""
    await ask(ours, picture(710), ASK)
    before = await engines.counts()
    workers = [serve.worker_pid(address) for address in serve.worker_addresses()]
    contents, asked = [], []
    with suspended(*(pid for worker in workers for pid in descendants(worker))):
        while not all((await load(ours)).values()):  # one after the other: a worker that reports a queue gets no more
            contents.append((text(f"Question {len(asked)}:"), picture(710), ASK))
            asked.append(asyncio.create_task(ask(ours, *contents[-1])))
            await eventually(lambda: in_flight(ours, len(asked)), "all requests are at a worker", 30)
        evict_unheld(serve)
        await asyncio.sleep(EVICTED_S)  # time: the store evicts at once, and has no message for it
    for content, found in zip(contents, await asyncio.gather(*asked), strict=True):
        assert found.outcomes == ["loaded"]
        assert found.answer.ids == (await plain.succeed(chat(*content))).ids
    encoded, loaded = await engines.counts()
    assert encoded == before[0]
    assert loaded > before[1], "one of the workers had it in no cache of its engine"


async def test_client_that_leaves_before_the_first_token_leaves_no_range(ours, store):
    for number in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3 + 0.2 * number), ours.opened(long_chat(picture(705 + number), ASK)) as found:
                await found.read()

    await nothing_is_held(store)


async def test_client_cannot_send_instructions_to_the_connector(ours, plain):
    body = chat(picture(709), ASK, vllm_xargs={"ec_transfer_params": json.dumps({"medialane": "x"})})
    answer = await ours.post(body)
    assert answer.status in (200, 400)
    assert (await ask(ours, picture(709), ASK)).answer.ids == (await plain.succeed(chat(picture(709), ASK))).ids
