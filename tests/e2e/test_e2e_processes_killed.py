"""kill -9 of any process: its requests fail immediately and clearly, others continue, and the process is restarted.

After each test `serve` is as before, except for its caches. One kill of each kind, with requests in several steps: what
does not depend on vLLM is tested with a fake engine (tests/integration/test_any_process_killed.py). What is not held is
overwritten. What a killed process has held is read at the store itself: the tests are one of its clients.
"""

import asyncio
import io
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import aiohttp
import pytest
import pytest_asyncio
from medialane_process import kill
from openai_http import Answer, chat, data_url, image, in_flight, load, long_chat, num_begun, photo, picture, text
from PIL import Image
from process_tree import cpu_s, descendants, is_alive, parent_of, suspended

from host_state import HostState, as_before, state_of, stats_of, store_link
from medialane.store import StoreLink
from medialane.worker import EXIT_ENGINE_LOST
from waiting import eventually

pytestmark = pytest.mark.vllm

ASK = text("Describe the picture.")
PROMPT = text("Tell a long story.")
AT_ONCE_S = 10
RESTART_S = 240
#: --worker-stall-timeout
STALL_S = 10


def huge_jpeg(shade: int) -> bytes:
    """45 million pixels, which keep a preparer busy for a second or more."""
    buffer = io.BytesIO()
    Image.new("RGB", (9000, 5000), (shade, 90, 200)).save(buffer, "JPEG", progressive=True)
    return buffer.getvalue()


async def busy_one(pids: list[int], before: dict[int, float]) -> int:
    """The process that started working since `before`."""

    def working() -> list[int]:
        return [pid for pid in pids if cpu_s(pid) - before[pid] > 0.1]

    await eventually(lambda: bool(working()), "a preparer works", 30)
    return working()[0]


def engine_pids(serve) -> list[int]:
    """The processes of all engines: while they are suspended, requests stay between worker and first token."""
    return [engine for pid in worker_pids(serve) for engine in descendants(pid)]


@pytest_asyncio.fixture
async def store(serve):
    """The tests' own connection to the store, which holds nothing."""
    async with store_link(serve.store_address) as link:
        yield link


@pytest_asyncio.fixture(autouse=True)
async def _as_before(serve, ours, store):
    async def state() -> HostState:
        workers = None
        with suppress(aiohttp.ClientError, TimeoutError):
            page = await ours.metrics()
            workers = (await ready_workers(ours), page.value("medialane_worker_in_flight"))
        return await state_of(serve.pid, store, workers)

    await comes_back(ours, 2)
    async with as_before(state, RESTART_S):
        yield


async def holds(store: StoreLink, number: int) -> bool:
    """Whether the store has granted this number of pins, by its own count: two for an image that a worker reads."""
    return (await stats_of(store)).arena.num_leases == number


async def ready_workers(ours) -> float:
    return (await ours.metrics()).value("medialane_worker_state", state="ready")


async def test_killed_preparer_fails_no_request_and_is_replaced(serve, ours):
    pids = serve.preparer_pids()
    assert len(pids) == 2
    restarts = (await ours.metrics()).value("medialane_preparer_restarts_total")
    before = {pid: cpu_s(pid) for pid in pids}
    # Resized after decoding: at full size it would exceed the context and not be decoded at all.
    part = {"type": "image_url", "image_url": {"url": data_url(huge_jpeg(10)), "max_pixels": 200_704}}
    slow = asyncio.create_task(ours.post(chat(ASK, part)))
    victim = await busy_one(pids, before)
    other = asyncio.create_task(ours.succeed(chat(picture(160), ASK)))
    kill(victim)
    answered = await slow
    assert answered.status == 200, answered.error
    assert (await other).ids
    assert (await ours.succeed(chat(picture(161), ASK))).ids

    async def replaced() -> bool:
        page = await ours.metrics()
        return page.value("medialane_preparers", state="alive") == 2

    await eventually(replaced, "there are two preparers again", 30)
    assert (await ours.metrics()).value("medialane_preparer_restarts_total") == restarts + 1
    assert victim not in serve.preparer_pids()
    assert len(serve.preparer_pids()) == 2


async def test_killed_fork_server_is_replaced(serve, ours):
    old = serve.preparer_pids()
    (forkserver,) = set(map(parent_of, old))
    kill(forkserver)
    await eventually(lambda: not any(map(is_alive, [forkserver, *old])), "its preparers end with it", 30)
    assert (await ours.succeed(chat(PROMPT))).ids

    async def prepares() -> bool:
        return (await ours.post(chat(picture(162), ASK))).status == 200

    await eventually(prepares, "images are prepared again", 120)
    await eventually(lambda: len(serve.preparer_pids()) == 2, "both preparers are back", 30)


async def test_killed_engine_core_ends_its_worker_which_restarts(serve, ours, plain, worker_addresses):
    right = (await plain.succeed(chat(picture(164), ASK))).ids
    request = await streaming(ours, long_chat(picture(164), PROMPT, stream=True))
    (address,) = [a for a, n in (await load(ours)).items() if n == 1]
    killed = serve.worker_pid(address)
    engines = descendants(killed)
    for engine in engines:
        kill(engine)
    assert await request is None, "its answer goes on at the other worker"

    async def answers() -> bool:
        """The worker may be chosen once more before it exits; the other one is available long before its restart."""
        answer = await ours.post(chat(picture(164), ASK))
        assert answer.status == 503 or answer.ids == right
        return answer.status == 200

    await eventually(answers, "the other worker answers", AT_ONCE_S)
    await eventually(lambda: not any(map(is_alive, [killed, *engines])), "the worker ends without its engine", 60)
    exited = f"exited (exit status {EXIT_ENGINE_LOST}); restarting"
    await eventually(lambda: exited in serve.log.read_text(), "it exits by itself, says why, and is restarted", 20)


async def test_killed_gateway_costs_its_own_requests_and_the_cache_stays(serve, ours, plain, store):
    right = (await plain.succeed(chat(picture(165), ASK))).ids
    old, arenas, preparers = serve.gateway_pid(), serve.arenas(), serve.preparer_pids()
    streamed = await streaming(ours, long_chat(picture(165), PROMPT, stream=True))
    with suspended(serve.pid):  # the supervisor: what follows happens without the next gateway
        with suspended(*engine_pids(serve)):
            num_held = (await stats_of(store)).arena.num_leases
            sent = asyncio.create_task(broken_off(ours, chat(picture(172), ASK)))
            await eventually(lambda: in_flight(ours, 2), "a second request is at a worker", 60)
            await eventually(lambda: holds(store, num_held + 2), "the worker holds its image, too", 20)
            num_done = (await stats_of(store)).preparers.num_done
            kill(old)
            assert await asyncio.gather(streamed, sent) == ["connection lost"] * 2
        await eventually(lambda: holds(store, 0), "the gateway's and then the workers' holds end", 30)
    await serve.answers()
    assert serve.gateway_pid() != old
    assert (serve.arenas(), serve.preparer_pids()) == (arenas, preparers)
    await comes_back(ours, 2)
    again = [await ours.succeed(chat(picture(165), ASK)) for _ in range(2)]
    assert [(found.cache, found.copied_bytes, found.ids) for found in again] == [("hit", 0, right)] * 2
    assert (await stats_of(store)).preparers.num_done == num_done


async def test_store_killed_during_answers_costs_other_media_requests_only_time(serve, ours, plain, store):
    """The supervisor is suspended at first, so that there is no store for as long as requests wait for one."""
    body = chat(picture(166), PROMPT, max_tokens=2500, ignore_eos=True)
    unstarted = chat(picture(170), ASK)
    right, right_text, right_other, right_unstarted = [
        (await plain.succeed(found)).ids for found in (body, chat(PROMPT), chat(picture(167), ASK), unstarted)
    ]
    old, arenas, others = serve.store_pid(), serve.arenas(), (serve.gateway_pid(), *worker_pids(serve))
    below = descendants(old)
    async with ours.opened({**body, "stream": True}) as response:
        tokens = tokens_of(response)
        answer = [*await anext(tokens)]
        with suspended(serve.pid):
            with suspended(*engine_pids(serve)):
                sent = asyncio.create_task(ours.post(unstarted))
                await eventually(lambda: holds(store, 4), "a request that has no token yet is held by a worker", 60)
                kill(old)
            asked_at = time.monotonic()
            waiting = asyncio.create_task(ours.post(chat(picture(167), ASK)))
            assert (await ours.succeed(chat(PROMPT))).ids == right_text
            assert time.monotonic() - asked_at < AT_ONCE_S / 2
            assert not waiting.done()
            refused = await waiting
            assert (refused.status, refused.error["code"]) == (503, "media_store_unavailable")
            assert refused.headers["retry-after"]
        async for more in tokens:
            answer += more
    assert (answer, (await sent).ids) == (right, right_unstarted)
    await eventually(lambda: answers_or_503(ours, chat(picture(167), ASK), right_other), "images are prepared", 120)
    await eventually(lambda: not any(map(is_alive, [old, *below])), "its preparers end with it", 30)
    assert serve.arenas() == arenas, "the next store has taken over its arena"
    assert others == (serve.gateway_pid(), *worker_pids(serve))
    again = [await ours.succeed({**body, "max_tokens": 20}) for _ in range(2)]
    assert [(found.cache, found.ids) for found in again] == [("hit", right[:20])] * 2
    assert [found.copied_bytes for found in again] == [0, 0], "by shared memory"


async def test_media_that_were_sent_once_survive_the_store(serve, ours, plain):
    data = photo(168)
    right = (await plain.succeed(chat(image(data_url(data)), ASK))).ids
    path = "/medialane/v1/media"
    async with ours.session() as session, session.put(ours.base_url + path, data=data) as response:
        media = await response.json()
    kill(serve.store_pid())
    assert (await ours.succeed(chat(image(f"medialane:media/{media['hash']}"), ASK))).ids == right
    async with ours.session() as session, session.delete(f"{ours.base_url}{path}/{media['hash']}") as response:
        assert response.status == 200


async def test_store_killed_while_preparing_answers_from_the_next_store_or_503(serve, ours, plain):
    bodies = [
        chat(image(data_url(huge_jpeg(20))), ASK, mm_processor_kwargs={"max_pixels": 200_704}),
        chat(picture(168), ASK),
    ]
    right = [(await plain.succeed(body)).ids for body in bodies]
    old, arenas, pids = serve.store_pid(), serve.arenas(), serve.preparer_pids()
    before = {pid: cpu_s(pid) for pid in pids}
    preparing = asyncio.create_task(ours.post(bodies[0]))
    await busy_one(pids, before)
    kill(old)
    for answer, expected in zip(await asyncio.gather(preparing, ours.post(bodies[1])), right, strict=True):
        assert is_right_or_503(answer, expected)
    for body, expected in zip(bodies, right, strict=True):
        await eventually(lambda b=body, e=expected: answers_or_503(ours, b, e), "the next store prepares it", 120)
        again = await ours.succeed(body)
        assert (again.cache, again.ids) == ("hit", expected)
    await eventually(lambda: not any(map(is_alive, [old, *pids])), "the preparers end with their store", 30)
    assert serve.arenas() == arenas, "the next store has taken over its arena"


@pytest.mark.thread
async def test_killed_worker_fails_its_requests_immediately_and_restarts(serve, ours, plain, store):
    unstarted = chat(picture(171), ASK)
    right, right_unstarted = [(await plain.succeed(found)).ids for found in (chat(picture(163), ASK), unstarted)]
    old_store, arenas = serve.store_pid(), serve.arenas()
    num_migrated = (await ours.metrics()).value("medialane_migrations_total")

    async def have_begun() -> bool:
        return await num_begun(ours) >= num_begun_before + 3

    async def is_rerouted() -> bool:
        return (await ours.metrics()).value("medialane_migrations_total") > num_migrated

    num_begun_before = await num_begun(ours)
    asked = long_chat(picture(163), PROMPT, n=2, stream=True, max_tokens=3000)  # some are read to their end
    streams = [asyncio.create_task(broken_off(ours, asked)) for _ in range(3)]
    await eventually(have_begun, "all streams have begun", 60)
    num_streams = await load(ours)
    with suspended(serve.pid):  # the supervisor, which would kill the engine
        with suspended(*engine_pids(serve)):
            num_held = (await stats_of(store)).arena.num_leases
            sent = asyncio.create_task(ours.post(unstarted))
            await eventually(lambda: in_flight(ours, 4), "a request without a token is at a worker", 60)
            await eventually(lambda: holds(store, num_held + 2), "the worker holds its image, too", 20)
            assert (await stats_of(store)).embeddings.num_writing == 1, "its engine is about to write an embedding"
            (address,) = [a for a, n in (await load(ours)).items() if n > num_streams[a]]
            killed = serve.worker_pid(address)
            engines = descendants(killed)
            kill(killed)
            await eventually(is_rerouted, "the request that has sent no token is sent to the other worker", AT_ONCE_S)
            os.kill(old_store, signal.SIGUSR1)  # overwrites what is not held
        assert (await sent).ids == right_unstarted
        assert (await ours.succeed(chat(picture(163), ASK))).ids == right
        ends = await asyncio.gather(*streams)
        assert [end for end in ends if end is not None] == ["worker_lost"] * int(num_streams[address])
        await eventually(lambda: not any(map(is_alive, engines)), "its engine has ended with it", 60)
    await comes_back(ours, 2)
    assert serve.worker_pid(address) != killed
    answers = await asyncio.gather(*(ours.succeed(chat(picture(163), ASK)) for _ in range(4)))
    assert [answer.ids for answer in answers] == [right] * 4
    assert (serve.store_pid(), serve.arenas()) == (old_store, arenas)


async def test_stopped_engine_is_reported_its_requests_move_and_it_returns(serve, ours, plain, store):
    body = chat(picture(173), ASK)
    right = (await plain.succeed(body)).ids
    by_worker = {serve.worker_pid(name): name for name in serve.named_workers()}
    streamed = await streaming(ours, long_chat(picture(174), PROMPT, stream=True, max_tokens=1500))
    (busy,) = [name for name, number in (await load(ours)).items() if number == 1]
    (stopped,) = [pid for pid, name in by_worker.items() if name != busy]
    with suspended(*descendants(stopped)):
        stopped_at = time.monotonic()
        sent = [asyncio.create_task(ours.post(body)) for _ in range(3)]  # some to each worker
        await eventually(lambda: is_degraded(ours, "1 of 2 workers is stalled (see its log)"), "it says so", 20)
        assert time.monotonic() - stopped_at < STALL_S + 3, "10 s, some ticks, and a report"
        state = await ours.metrics()
        assert state.value("medialane_worker_state", worker=by_worker[stopped], state="stalled") == 1
        assert [answer.ids for answer in await asyncio.gather(*sent)] == [right] * 3
        assert (await ours.succeed(body)).ids == right
    assert await streamed is None, "the other worker's stream was not disturbed"
    await comes_back(ours, 2)
    assert serve.worker_pid(by_worker[stopped]) == stopped, "without a restart"


async def is_degraded(ours, problem: str) -> bool:
    async with ours.session() as session, session.get(f"{ours.base_url}/health") as response:
        return response.status == 200 and problem in (await response.text())


def worker_pids(serve) -> list[int]:
    return [serve.worker_pid(address) for address in serve.worker_addresses()]


async def tokens_of(response) -> AsyncIterator[list[int]]:
    """The token ids of each event of a stream."""
    async for line in response.content:
        if line.startswith(b"data: {"):
            for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                yield choice.get("token_ids") or []


def is_right_or_503(answer: Answer, right: list[int]) -> bool:
    """Whether there is an answer; without one, the error says that the store is missing and when to try again."""
    if answer.status == 200:
        assert answer.ids == right
        return True
    assert (answer.status, answer.error["code"]) == (503, "media_store_unavailable")
    assert answer.headers["retry-after"]
    return True


async def answers_or_503(ours, body, right: list[int]) -> bool:
    answer = await ours.post(body)
    return is_right_or_503(answer, right) and answer.status == 200


async def comes_back(ours, num_workers: int) -> None:
    async def there() -> bool:
        return await ready_workers(ours) == num_workers

    await eventually(there, "all workers are ready again", RESTART_S)


async def streaming(ours, body) -> asyncio.Task[str | None]:
    """Start `broken_off`; the first token has been sent."""
    before = await num_begun(ours)

    async def has_begun() -> bool:
        return await num_begun(ours) > before

    request = asyncio.create_task(broken_off(ours, body))
    await eventually(has_begun, "the stream has begun", 60)
    return request


async def broken_off(ours, body) -> str | None:
    """The error that broke off a stream, or None."""
    try:
        answer: Answer = await ours.post(body)
    except aiohttp.ClientError:
        return "connection lost"
    has_failed = answer.status != 200 or "error" in answer.events[-1]
    return answer.error["code"] if has_failed else None
