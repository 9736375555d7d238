"""Mixed requests whose right answers are known, asked over and over while something else disturbs the server.

Each question is asked once before, undisturbed and under a cache salt of its own: from then on its greedy tokens are
known, and nothing of it is cached. A client asks again after an error that allows it, as clients are told to. What an
answer must be, whatever is disturbed meanwhile:

* its tokens are those of the undisturbed answer;
* an item that an earlier answer has had is a hit: it was ready, and nothing here fills the arena;
* a file of such an item is not fetched again;
* an error is one of those that the disturbance may cause, and says when to try again.
"""

import asyncio
import random
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from made_embeddings import embeds
from openai_http import Answer, BrokenOff, OpenAiHttp, chat, image, photo, picture, text, video

from http_origin import HttpOrigin, answer
from waiting import eventually

NUM_CLIENTS = 4
#: Longer than any restart.
ANSWERED_S = 240
#: Of the seeds of pictures, so that all pictures of a load differ.
_KNOWN, _PAIRED, _NAMED, _FETCHED, _NEW = 2000, 2100, 2200, 2300, 3000
_NUM_FETCHED = 4
_SIZE = (320, 240)
_RETRY_S = 0.25

CONNECTION_LOST = "connection lost"
#: What clients may get while a process of this kind is away.
STORE_LOST = frozenset({"media_store_unavailable"})
WORKER_LOST = frozenset({"worker_lost", "no_worker_ready", "generation_failed"})
GATEWAY_LOST = frozenset({CONNECTION_LOST})


@dataclass(frozen=True)
class Question:
    """A request: its `right` answer has this name, and `media` names the content of each of its items that is kept.
    `uuid` is that of its item; if it `needs` that, it has an answer only after another one with the item."""

    right: str
    content: tuple[dict[str, Any], ...]
    media: tuple[str, ...] = ()
    uuid: str = ""
    needs_uuid: bool = False
    max_tokens: int = 8


def repeated_questions(origin: HttpOrigin) -> list[Question]:
    asked = [Question(f"text {n}", (text(f"Tell story number {n}."),), max_tokens=24) for n in range(4)]
    for n in range(6):
        part, name = picture(_KNOWN + n, *_SIZE), f"picture {n}"
        asked += [Question(f"{name}. {ask}", (part, text(ask)), (name,)) for ask in ("What?", "Where?")]
    for n in range(2):
        parts = (picture(_PAIRED + n, *_SIZE), text("and"), picture(_KNOWN + n, *_SIZE), text("Compare."))
        asked.append(Question(f"pair {n}", parts, (f"paired {n}", f"picture {n}")))
    for n in range(_NUM_FETCHED):
        asked.append(Question(f"url {n}", (image(origin.url(f"/{n}")), text("Where?")), (f"/{n}",)))
    for n in range(3):
        name, uuid = f"named {n}", f"of-{n}"
        part = {**picture(_NAMED + n, *_SIZE), "uuid": uuid}
        asked += [
            Question(name, (part, text("Who?")), (name,), uuid),
            Question(name, ({**part, "image_url": None}, text("Who?")), (name,), uuid, needs_uuid=True),
        ]
    for n in range(2):
        name, part = f"embeds {n}", embeds(50 + n, uuid=f"of-embeds-{n}")
        asked += [
            Question(name, (part, text("Who?")), uuid=part["uuid"]),
            Question(name, ({**part, "image_embeds": None}, text("Who?")), uuid=part["uuid"], needs_uuid=True),
        ]
    return [*asked, Question("video", (video(1, num_frames=4), text("What happens?")), ("video",))]


def new_questions(number: int) -> list[Question]:
    """With an image that no other question has."""
    return [
        Question(f"new {n}", (picture(_NEW + n, *_SIZE), text("What?")), (f"new {n}",), max_tokens=4 + n % 30)
        for n in range(number)
    ]


@dataclass
class MixedLoad:
    """Used inside of `asking`. `allowed` are the errors after which a client asks again: their codes, and
    CONNECTION_LOST."""

    client: OpenAiHttp
    origin: HttpOrigin
    random: random.Random
    repeated: list[Question]
    new: list[Question]
    allowed: frozenset[str] = frozenset()
    counts: Counter[str] = field(default_factory=Counter)
    #: Descriptions of answers that were not as they must be.
    problems: list[str] = field(default_factory=list)
    #: Content, and its uuids, that an answer has had. Replaced when that may have been evicted.
    ready: set[str] = field(default_factory=set)
    _right: dict[str, list[int]] = field(default_factory=dict)
    _num_new_asked: int = 0
    _stopping: bool = False

    def __repr__(self) -> str:
        return f"{dict(self.counts)}, {len(self.problems)} problems: {self.problems[:8]}"

    async def answers(self, number: int) -> None:
        """Wait for this many more answers."""
        before = self.counts["answer"]
        await eventually(lambda: self.counts["answer"] >= before + number, "answers", ANSWERED_S, more=lambda: self)

    async def all_that_was_ready_is_a_hit(self) -> None:
        """Ask each question whose items have all been in an answer."""
        for question in [*self.repeated, *self.new]:
            if question.media and self.ready.issuperset(question.media):
                await self._ask(question, stream=False)
        self.check()

    def check(self) -> None:
        """Raise AssertionError if any answer was not as it must be."""
        assert not self.problems, repr(self)

    async def learn(self) -> None:
        """Ask each question undisturbed, under a salt."""
        running = asyncio.Semaphore(NUM_CLIENTS)

        async def learn(question: Question) -> None:
            async with running:
                body = chat(*question.content, max_tokens=question.max_tokens, cache_salt="undisturbed")
                self._right[question.right] = (await self.client.succeed(body)).ids

        async with asyncio.TaskGroup() as tasks:
            for question in [*self.repeated, *self.new]:
                if not question.needs_uuid:
                    tasks.create_task(learn(question))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CLIENTS):
                tasks.create_task(self._client())

    def stop(self) -> None:
        """`run` returns when each client has its answer."""
        self._stopping = True

    async def _client(self) -> None:
        while not self._stopping:
            await self._ask(self._next(), stream=self.random.random() < 0.4)

    def _next(self) -> Question:
        if self._num_new_asked < len(self.new) and self.random.random() < 0.15:
            self._num_new_asked += 1
            return self.new[self._num_new_asked - 1]
        return self.random.choice([each for each in self.repeated if not each.needs_uuid or each.uuid in self.ready])

    async def _ask(self, question: Question, *, stream: bool) -> None:
        before, num_fetched = self.ready, self._num_fetched(question)
        ready = before.intersection(question.media)
        body = chat(*question.content, max_tokens=question.max_tokens, stream=stream)
        body["medialane"] = {"report": True}
        async with asyncio.timeout(ANSWERED_S):
            found = await self._answer(body, question, before)
            while found is None:
                await asyncio.sleep(_RETRY_S)  # time: as clients do that ask again
                found = await self._answer(body, question, before)
        self.counts["answer"] += 1
        if found.status == 200:
            ready = ready if before is self.ready else set()
            self._judge(question, found, ready)
            if ready and self._num_fetched(question) > num_fetched:
                self.problems.append(f"{question.right} was fetched again")
            self.ready.update((*question.media, question.uuid))

    async def _answer(self, body: dict[str, Any], question: Question, ready: set[str]) -> Answer | None:
        """None if the client may ask again. What was `ready` may have been evicted."""
        try:
            found = await self.client.post(body)
        except (aiohttp.ClientError, BrokenOff) as error:
            self.counts[CONNECTION_LOST] += 1
            if CONNECTION_LOST not in self.allowed:
                self.problems.append(f"{question.right}: {error!r}")
            return None
        if found.status == 200 and not (found.events and "error" in found.events[-1]):
            return found
        code = found.error["code"]
        self.counts[code] += 1
        if code in self.allowed and (found.status != 503 or "retry-after" in found.headers):
            return None
        if code != "unknown_media_uuid" or ready is self.ready:
            self.problems.append(f"{question.right}: {code} is not allowed: {found.error}")
        return found

    def _judge(self, question: Question, found: Answer, ready: set[str]) -> None:
        right = self._right[question.right]
        if found.ids != right:
            self.problems.append(f"{question.right}: {found.ids} instead of {right}")
        if found.json is not None and question.media:
            cached = [item["cache"] for item in found.json["medialane"]["items"]]
            missed = [name for name, how in zip(question.media, cached, strict=True) if name in ready and how != "hit"]
            self.counts["hit"] += cached.count("hit")
            self.problems += [f"{question.right}: {name} was ready and is no hit: {cached}" for name in missed]

    def _num_fetched(self, question: Question) -> int:
        return sum(request.path in question.media for request in self.origin.requests)


@asynccontextmanager
async def asking(client: OpenAiHttp, *, seed: int, num_new: int):
    """A load that runs during the block; what it has found is checked at its end."""
    async with HttpOrigin() as origin:
        for n in range(_NUM_FETCHED):
            body = photo(_FETCHED + n, *_SIZE)
            origin.routes[f"/{n}"] = answer(body=body, content_type="image/jpeg", cache_control="max-age=3600")
        load = MixedLoad(client, origin, random.Random(seed), repeated_questions(origin), new_questions(num_new))
        await load.learn()
        running = asyncio.create_task(load.run())
        try:
            await load.answers(2 * len(load.repeated))
            load.check()
            yield load
            load.stop()
            async with asyncio.timeout(ANSWERED_S):
                await running
            load.check()
        finally:
            running.cancel()
            await asyncio.wait([running])
