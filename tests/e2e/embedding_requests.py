"""Requests whose embeddings are watched: by their reports, by the engines' own counts, and in the store."""

import asyncio
import os
import signal
from dataclasses import dataclass

from medialane_process import PING_S
from openai_http import Answer, OpenAiHttp, chat, text

from host_state import stats_of
from waiting import eventually

#: After this, the counts include what was answered before: workers ask their engines for them every PING_S.
REPORTED_S = 5 * PING_S


class Engines:
    """What the engines have done so far whose workers have their metrics at `num` ports from `first_port` on."""

    def __init__(self, first_port, num=2):
        self._pages = [OpenAiHttp(f"http://127.0.0.1:{first_port + number}", "") for number in range(num)]

    async def count(self, outcome):
        pages = [await page.metrics() for page in self._pages]
        return sum(page.value("medialane_worker_embeddings_total", outcome=outcome) for page in pages)

    async def counts(self):
        """The items encoded and loaded, of all requests that have been answered."""
        await asyncio.sleep(REPORTED_S)  # time: until the workers have asked their engines
        return [await self.count(outcome) for outcome in ("encoded", "loaded")]


@dataclass(frozen=True)
class Reported:
    """An answer, and what its report says: about the embedding of each item, and the worker."""

    body: dict
    answer: Answer
    outcomes: list[str | None]
    worker: str


async def ask(client, *content, **options):
    body = chat(*content, **options)
    answer = await client.succeed({**body, "medialane": {"report": True}})
    report = answer.json["medialane"]
    return Reported(body, answer, [item.get("embedding") for item in report["items"]], report["routing"]["worker"])


async def at_both_workers(client, *content, **options):
    """Ask until both workers have answered, with questions that are in no KV cache. Return the first answer of
    each."""
    found = {}
    for number in range(40):
        if len(found) == 2:
            return found
        asked = [ask(client, text(f"Question {number}.{n}:"), *content, **options) for n in range(4)]
        for each in await asyncio.gather(*asked):
            found.setdefault(each.worker, each)
    raise AssertionError(f"only {list(found)} have answered")


def evict_unheld(serve):
    """Have the store free, and overwrite, all media that are not held; embeddings are media, too."""
    os.kill(serve.store_pid(), signal.SIGUSR1)


async def evict(serve, store):
    """Evict all media: none are held for long."""

    async def evicted():
        evict_unheld(serve)
        arena = (await stats_of(store)).arena
        return arena.published_bytes == arena.pinned_bytes

    await eventually(evicted, "all is evicted", 30)


async def nothing_is_held(store, timeout_s=30):
    """Wait until no media are held, and no memory is reserved for any."""
    found = None

    async def is_idle():
        nonlocal found
        found = stats = await stats_of(store)
        if stats is None:
            return False
        writing = stats.embeddings.num_writing + stats.embeddings.num_revoking
        return (stats.arena.num_leases, stats.arena.num_reservations, writing) == (0, 0, 0)

    await eventually(is_idle, "nothing is held", timeout_s, more=lambda: found)
