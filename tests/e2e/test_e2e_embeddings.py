"""An image is encoded once for both workers, as the engines count it, and the answers are plain vLLM's."""

import asyncio
import json
import os
import signal

import pytest
from medialane_process import PING_S
from openai_http import OpenAiHttp, chat, in_flight, long_chat, picture, text, video
from process_tree import descendants, suspended

from host_state import stats_of, store_link
from waiting import eventually

pytestmark = pytest.mark.vllm

ASK = text("What is in the picture?")
#: After this, the counts include what was answered before: workers ask their engines for them every PING_S.
REPORTED_S = 5 * PING_S
EVICTED_S = 0.5


@pytest.fixture
async def store(serve):
    async with store_link(serve.store_address) as link:
        yield link


class Engines:
    """What the engines of both workers have done so far."""

    def __init__(self, metrics_port):
        self._pages = [OpenAiHttp(f"http://127.0.0.1:{metrics_port + number}", "") for number in range(2)]

    async def count(self, outcome):
        pages = [await page.metrics() for page in self._pages]
        return sum(page.value("medialane_worker_embeddings_total", outcome=outcome) for page in pages)

    async def counts(self):
        """The items encoded and loaded, of all requests that have been answered."""
        await asyncio.sleep(REPORTED_S)  # time: until the workers have asked their engines
        return [await self.count(outcome) for outcome in ("encoded", "loaded")]


@pytest.fixture
def engines(metrics_port):
    return Engines(metrics_port)


async def ask(client, *content, **options):
    """The answer, and what its report says about the embedding of each item, and about the worker."""
    answer = await client.succeed(chat(*content, **options, medialane={"report": True}))
    report = answer.json["medialane"]
    return answer, [item.get("embedding") for item in report["items"]], report["routing"]["worker"]


async def at_both_workers(client, *content):
    """Ask until both workers have answered: with questions of which none is in a KV cache."""
    found = {}
    for number in range(40):
        if len(found) == 2:
            return found
        asked = [ask(client, text(f"Question {number}.{n}:"), *content) for n in range(4)]
        found |= {worker: outcomes for _, outcomes, worker in await asyncio.gather(*asked)}
    raise AssertionError(f"only {list(found)} have answered")


async def evict(serve, store):
    """Free, and overwrite, all media that are not held; embeddings are media, too."""
    pid = serve.store_pid()

    async def evicted():
        os.kill(pid, signal.SIGUSR1)
        arena = (await stats_of(store)).arena
        return arena.published_bytes == arena.pinned_bytes

    await eventually(evicted, "all is evicted", 30)


async def test_new_image_is_encoded_once_and_known_to_both_workers(ours, plain, serve, engines):
    before = await engines.counts()
    first, outcomes, _ = await ask(ours, picture(700), ASK)
    assert outcomes == ["encoded"]
    assert first.ids == (await plain.succeed(chat(picture(700), ASK))).ids
    assert await engines.counts() == [before[0] + 1, before[1]]
    found = await at_both_workers(ours, picture(700), ASK)
    assert list(found.values()) == [["loaded"]] * 2
    assert (await engines.counts())[0] == before[0] + 1


async def test_answers_by_embeddings_equal_plain_vllm(ours, plain):
    await ask(ours, picture(701), ASK)
    for number in range(4):
        content = (text(f"Question {number}:"), picture(701), ASK)
        answer, outcomes, _ = await ask(ours, *content)
        assert outcomes == ["loaded"]
        assert answer.ids == (await plain.succeed(chat(*content))).ids


async def test_one_of_two_images_is_known(ours, plain, engines):
    await ask(ours, picture(702), ASK)
    before = await engines.counts()
    content = (text("Compare"), picture(702), text("and"), picture(703), ASK)
    answer, outcomes, _ = await ask(ours, *content)
    assert outcomes == ["loaded", "encoded"]
    assert answer.ids == (await plain.succeed(chat(*content))).ids
    assert (await engines.counts())[0] == before[0] + 1  # the known one may be in the engine's own encoder cache


async def test_video_is_encoded_once(ours, plain):
    options = {"media_io_kwargs": {"video": {"num_frames": 4}}}
    for question, expected in (("What happens?", "encoded"), ("Once more, what happens?", "loaded")):
        content = (text(question), video(3))
        answer, outcomes, _ = await ask(ours, *content, **options)
        assert outcomes == [expected]
        assert answer.ids == (await plain.succeed(chat(*content, **options))).ids


async def test_evicted_embedding_is_made_again(ours, plain, serve, store, engines):
    await ask(ours, picture(704), ASK)
    await evict(serve, store)
    before = await engines.counts()
    content = (text("Again:"), picture(704), ASK)
    answer, outcomes, _ = await ask(ours, *content)
    assert answer.ids == (await plain.succeed(chat(*content))).ids
    assert outcomes in (["encoded"], ["unkept"])
    assert (await engines.counts())[1] == before[1]


async def test_eviction_between_routing_and_load_spares_what_is_to_be_loaded(ours, plain, serve, store, engines):
    """What is evicted is overwritten: an embedding that nobody held would give another answer."""
    await ask(ours, picture(710), ASK)
    before = await engines.counts()
    contents = [(text(f"Question {number}:"), picture(710), ASK) for number in range(8)]
    workers = [serve.worker_pid(address) for address in serve.worker_addresses()]
    with suspended(*(pid for worker in workers for pid in descendants(worker))):
        asked = [asyncio.create_task(ask(ours, *content)) for content in contents]
        await eventually(lambda: in_flight(ours, len(contents)), "all requests are at a worker", 30)
        os.kill(serve.store_pid(), signal.SIGUSR1)
        await asyncio.sleep(EVICTED_S)  # time: the store evicts at once, and has no message for it
    for content, (answer, outcomes, _) in zip(contents, await asyncio.gather(*asked), strict=True):
        assert outcomes == ["loaded"]
        assert answer.ids == (await plain.succeed(chat(*content))).ids
    encoded, loaded = await engines.counts()
    assert encoded == before[0]
    assert loaded > before[1], "one of the workers had it in no cache of its engine"


async def test_client_that_leaves_before_the_first_token_leaves_no_range(ours, store):
    for number in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3 + 0.2 * number), ours.opened(long_chat(picture(705 + number), ASK)) as found:
                await found.read()

    async def is_idle():
        arena = (await stats_of(store)).arena
        return (arena.num_leases, arena.num_reservations) == (0, 0)

    await eventually(is_idle, "nothing is held", 30)


async def test_client_cannot_send_instructions_to_the_connector(ours, plain):
    body = chat(picture(709), ASK, vllm_xargs={"ec_transfer_params": json.dumps({"medialane": "x"})})
    answer = await ours.post(body)
    assert answer.status in (200, 400)
    assert (await ask(ours, picture(709), ASK))[0].ids == (await plain.succeed(chat(picture(709), ASK))).ids
