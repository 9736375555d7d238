"""An encoder beside the workers of `serve`: answers are plain vLLM's, whatever happens to it."""

import asyncio
import os
import sys

import pytest
import pytest_asyncio
from embedding_requests import nothing_is_held
from medialane_process import START_S, kill, launch
from openai_http import chat, picture, text, video
from process_tree import descendants, suspended

from host_state import store_link
from waiting import eventually

pytestmark = pytest.mark.vllm

ASK = text("What is in the picture?")
#: Images of a burst, small ones: the workers encode the ones that the encoder does not.
#: Their headers are there within a second on a slow machine too: later ones of a burst may be refused.
NUM_REQUESTS = 50
STOPPED_S = 5


class Encoder:
    """The encoder's process, as the gateway sees it."""

    def __init__(self, pid, address, client):
        self.pid, self._address, self._client = pid, address, client

    async def is_ready(self):
        page = await self._client.metrics()
        return page.value("medialane_worker_transport", worker=self._address, transport="shm") == 1

    async def outcomes(self):
        return (await self._client.metrics()).by("medialane_encoder_requests_total", "outcome")

    async def num_encoded(self):
        return (await self.outcomes()).get("encoded", 0)


@pytest.fixture(scope="module")
def client(gateways):
    return gateways["encoders"]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def encoder(serve, client, server_flags, encoder_address, vllm_environ, tmp_path_factory):
    """Started once. The last test kills it."""
    command = [sys.executable, "-m", "medialane", "worker", serve.model, "--role", "encoder"]
    process = launch(
        [*command, "--listen", encoder_address, "--store", serve.store_address, "--", *server_flags],
        environ={**vllm_environ, "VLLM_RPC_BASE_PATH": os.path.dirname(encoder_address.removeprefix("unix:"))},
        log=tmp_path_factory.mktemp("encoder") / "encoder.log",
    )
    encoder = Encoder(process.pid, encoder_address, client)
    await eventually(encoder.is_ready, "the encoder is ready", START_S)
    # Earlier tests have reset the workers' encoder caches: since then their embeddings differ from a new process's.
    await client.succeed({}, "/reset_encoder_cache")
    yield encoder
    process.kill()
    process.wait()


@pytest.fixture
async def store(serve):
    async with store_link(serve.store_address) as link:
        yield link


@pytest.mark.parametrize(
    "content",
    [[picture(900), ASK], [picture(901), picture(902, 640, 200), picture(901), ASK], [video(903), ASK]],
    ids=["image", "images", "video"],
)
async def test_new_items_are_encoded_by_the_encoder_and_loaded_by_the_worker(client, plain, encoder, content):
    num_items, before = len({str(part) for part in content}) - 1, await encoder.num_encoded()
    answer = await client.succeed(chat(*content, medialane={"report": True}))
    assert answer.ids == (await plain.succeed(chat(*content))).ids
    assert await encoder.num_encoded() == before + num_items
    assert {item["embedding"] for item in answer.json["medialane"]["items"]} == {"loaded"}
    assert "encode" in answer.steps
    again = await client.succeed(chat(*content, text("And?")))
    assert "encode" not in again.steps
    assert await encoder.num_encoded() == before + num_items


async def burst(client, seed, number=NUM_REQUESTS):
    """Requests with new images, at once. Their ids; fails if one does not end with an answer."""
    bodies = [chat(picture(seed + n, 64, 48), ASK, max_tokens=3) for n in range(number)]
    answers = await asyncio.gather(*map(client.succeed, bodies))
    return bodies, [answer.ids for answer in answers]


async def test_burst_while_the_encoder_is_stopped_is_answered_by_the_workers(client, plain, encoder, store):
    before = await encoder.outcomes()
    with suspended(encoder.pid, *descendants(encoder.pid)):
        running = asyncio.create_task(burst(client, 10_000))
        await asyncio.sleep(STOPPED_S)  # time: as long as the encoder is stopped
    bodies, ids = await running
    assert all(len(found) == 3 for found in ids)
    for n in (0, NUM_REQUESTS // 2, NUM_REQUESTS - 1):
        assert ids[n] == (await plain.succeed(bodies[n])).ids
    after = await encoder.outcomes()
    assert sum(after.get(o, 0) - before.get(o, 0) for o in ("late", "failed")) > 0
    await nothing_is_held(store)

    await eventually(encoder.is_ready, "the encoder is back", 30)
    num_encoded = await encoder.num_encoded()
    await client.succeed(chat(picture(910), ASK))
    assert await encoder.num_encoded() == num_encoded + 1


async def test_burst_while_the_encoder_is_killed_is_answered_by_the_workers(client, plain, encoder, store):
    before = await encoder.num_encoded()
    running = asyncio.create_task(burst(client, 20_000))

    async def some_are_encoded():
        return await encoder.num_encoded() > before

    await eventually(some_are_encoded, "the encoder works on the burst", 30)
    kill(encoder.pid)
    bodies, ids = await running
    assert all(len(found) == 3 for found in ids)
    for n in (0, NUM_REQUESTS // 2, NUM_REQUESTS - 1):
        assert ids[n] == (await plain.succeed(bodies[n])).ids
    await nothing_is_held(store)
    assert "0 of 1 encoders are ready" in (await client.get("/health")).json["problems"]
    assert (await client.succeed(chat(picture(911), ASK))).ids == (await plain.succeed(chat(picture(911), ASK))).ids
