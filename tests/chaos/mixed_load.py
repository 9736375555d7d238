"""Mixed requests whose right answers are known, asked over and over while something else disturbs the server.

Each question is asked once before, undisturbed and under a cache salt of its own: from then on its greedy tokens are
known, and nothing of it is cached. A client asks again after an error that allows it, as clients are told to. Some ask
for a stream, some send slowly, some go away in the middle. What an answer must be, whatever is disturbed meanwhile:

* it ends once, in time: as a whole, each of its choices with one reason, or by an error;
* its tokens equal the undisturbed answer's;
* an item that an earlier answer has had is a hit, unless the arena was full: it was ready;
* a file of such an item is not fetched again;
* an error is one that the disturbance may cause, and says when to try again.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from made_embeddings import embeds
from openai_http import Answer, BrokenOff, OpenAiHttp, chat, image, photo, picture, text, video
from scenario import CONNECTION_LOST

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
#: Of a slow client: the pieces of its body, and the time between two, also of a stream that it reads.
_NUM_PIECES, _SLOW_S = 5, 0.1


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
    #: Sampled with a seed, if there are several. A real engine on a CPU cannot go on with a seed: asked as a whole.
    n: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


def repeated_questions(origin: HttpOrigin, *, with_embeds: bool) -> list[Question]:
    asked = [Question(f"text {n}", (text(f"Tell story number {n}."),), max_tokens=24 + 30 * n) for n in range(4)]
    asked += [Question(f"choices {n}", (text(f"Tell story number {n}."),), max_tokens=20, n=2) for n in range(2)]
    for n in range(6):
        part, name = picture(_KNOWN + n, *_SIZE), f"picture {n}"
        asked += [Question(f"{name}. {ask}", (part, text(ask)), (name,)) for ask in ("What?", "Where?")]
    asked.append(Question("long", (picture(_KNOWN, *_SIZE), text("Why?")), ("picture 0",), max_tokens=120))
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
    for n in range(2 if with_embeds else 0):
        name, part = f"embeds {n}", embeds(50 + n, uuid=f"of-embeds-{n}")
        asked += [
            Question(name, (part, text("Who?")), uuid=part["uuid"]),
            Question(name, ({**part, "image_embeds": None}, text("Who?")), uuid=part["uuid"], needs_uuid=True),
        ]
    frames = {"media_io_kwargs": {"video": {"num_frames": 4}}}
    return [*asked, Question("video", (video(1), text("What happens?")), ("video",), options=frames)]


def new_questions(number: int) -> list[Question]:
    """With an image that no other question has."""
    return [
        Question(f"new {n}", (picture(_NEW + n, *_SIZE), text("What?")), (f"new {n}",), max_tokens=4 + n % 30)
        for n in range(number)
    ]


#: What a simulated worker says when all ways to hand an item over have failed but the last: to process it from its URL.
NO_PROCESSOR = "a simulated worker has no processor"


@dataclass
class _Allowed:
    """Codes of errors, until a time of the clock."""

    codes: frozenset[str]
    until: float = float("inf")


@dataclass
class MixedLoad:
    """Used inside of `asking`. After an error that is allowed a client asks again."""

    client: OpenAiHttp
    origin: HttpOrigin
    random: random.Random
    repeated: list[Question]
    new: list[Question]
    #: In which each request must end.
    ended_s: float
    #: Whether workers can go on with a sampled stream.
    streams_seeded: bool
    counts: Counter[str] = field(default_factory=Counter)
    #: Descriptions of answers that were not as they must be.
    problems: list[str] = field(default_factory=list)
    #: Content, and its uuids, that an answer has had. Replaced when that may have been evicted.
    ready: set[str] = field(default_factory=set)
    running: asyncio.Task[None] = field(init=False)
    _allowed: list[_Allowed] = field(default_factory=list)
    _right: dict[str, list[list[int]]] = field(default_factory=dict)
    _lines: list[str] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)
    _num_new_asked: int = 0
    _num_hoards: int = 0
    _stopping: bool = False

    def __repr__(self) -> str:
        lines = "\n".join(self._lines)
        problems = "\n".join(self.problems[:20])
        return f"{dict(self.counts)}, {len(self.problems)} problems:\n{problems}\nwhat was done:\n{lines}"

    def log(self, line: str) -> None:
        """Keep a line for the description of a failure."""
        self._lines.append(f"{self._now():7.2f} {line}")

    @contextmanager
    def allowing(self, codes: frozenset[str]) -> Iterator[None]:
        """Allow these errors to requests that are under way during the block."""
        allowed = _Allowed(codes)
        self._allowed.append(allowed)
        try:
            yield
        finally:
            allowed.until = self._now()

    @contextmanager
    def nothing_kept(self) -> Iterator[None]:
        """During the block what is ready may be evicted at any time."""
        self._num_hoards += 1
        self.forget()
        try:
            yield
        finally:
            self._num_hoards -= 1
            self.forget()

    def forget(self) -> None:
        """What was ready may be evicted."""
        self.ready = set()

    async def answers(self, number: int) -> None:
        """Wait for this many more answers. Raises what has ended the load."""
        least = self.counts["answer"] + number
        await eventually(
            lambda: self.counts["answer"] >= least or self.running.done(), "answers", ANSWERED_S, more=lambda: self
        )
        if self.running.done():
            self.running.result()

    async def all_that_was_ready_is_a_hit(self) -> None:
        """Ask each question whose items have all been in an answer."""
        asked = [each for each in [*self.repeated, *self.new] if each.media and self.ready.issuperset(each.media)]
        await _by_clients(self._ask(question, stream=False) for question in asked)
        self.check()

    def check(self) -> None:
        """Raise AssertionError if any answer was not as it must be."""
        assert not self.problems, repr(self)

    async def expect(self, body: dict[str, Any], codes: frozenset[str], what: str) -> None:
        """A request that fails with one of these codes, or with one that is allowed."""
        started = self._now()
        try:
            async with asyncio.timeout(self.ended_s):
                found = await self.client.post(body)
        except (aiohttp.ClientError, BrokenOff, TimeoutError) as error:
            self._note_lost(what, error, started)
            return
        code = "" if found.status == 200 else found.error["code"]
        self.counts[f"{what}: {code or 'answer'}"] += 1
        if code not in codes and not self._is_allowed(code, started):
            self.problems.append(f"{self._now():.2f} {what}: {code or 'an answer'} instead of {sorted(codes)}")

    async def hold_open(self, part: dict[str, Any]) -> None:
        """Ask for a long answer about `part`, until cancelled. Errors are expected."""
        body = chat(part, text("Tell everything."), max_tokens=2000, stream=True, ignore_eos=True)
        with suppress(aiohttp.ClientError):
            async with self.client.opened(body) as response:
                is_held = response.status == 200
                self.counts["hoarded" if is_held else (await response.json())["error"]["code"]] += 1
                async for _ in response.content:
                    pass

    async def learn(self, client: OpenAiHttp) -> None:
        """Ask each question undisturbed, under a salt."""

        async def learn(question: Question) -> None:
            body = _body(question, cache_salt="undisturbed")
            self._right[question.right] = choices_of(await client.succeed(body))

        await _by_clients(learn(question) for question in [*self.repeated, *self.new] if not question.needs_uuid)

    def start(self) -> None:
        self.running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CLIENTS):
                tasks.create_task(self._client())

    async def stop(self) -> None:
        """Return when each client has its answer."""
        self._stopping = True
        async with asyncio.timeout(ANSWERED_S):
            await self.running

    def _now(self) -> float:
        return time.monotonic() - self._started

    async def _client(self) -> None:
        while not self._stopping:
            question, kind = self._next(), self.random.random()
            if kind < 0.1:
                await self._abort(question, self.random.randrange(12))
            else:
                await self._ask(
                    question,
                    stream=kind < 0.55 and (question.n == 1 or self.streams_seeded),
                    slow=kind > 0.95 or 0.5 < kind < 0.55,
                )

    def _next(self) -> Question:
        if self._num_new_asked < len(self.new) and self.random.random() < 0.15:
            self._num_new_asked += 1
            return self.new[self._num_new_asked - 1]
        return self.random.choice([each for each in self.repeated if not each.needs_uuid or each.uuid in self.ready])

    async def _abort(self, question: Question, num_lines: int) -> None:
        """A client that goes away after this many lines of a stream, or of an error."""
        started = self._now()
        try:
            async with asyncio.timeout(self.ended_s), self.client.opened(_body(question, stream=True)) as response:
                while num_lines and await response.content.readline():
                    num_lines -= 1
            self.counts["aborted"] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            self._note_lost(question.right, error, started)

    async def _ask(self, question: Question, *, stream: bool, slow: bool = False) -> None:
        before, num_fetched = self.ready, self._num_fetched(question)
        ready = before.intersection(question.media)
        body = _body(question, stream=stream)
        body["medialane"] = {"report": True}
        async with asyncio.timeout(ANSWERED_S):
            found = await self._answer(body, question, before, slow=slow)
            while found is None:
                await asyncio.sleep(_RETRY_S)  # time: as clients do that ask again
                found = await self._answer(body, question, before, slow=slow)
        self.counts["answer"] += 1
        if found.status == 200:
            self._note_prefill(found)
            ready = ready if before is self.ready and not self._num_hoards else set()
            self._judge(question, found, ready)
            if ready and self._num_fetched(question) > num_fetched:
                self._wrong(question, "was fetched again")
            self.ready.update((*question.media, question.uuid))

    async def _answer(self, body: dict[str, Any], question: Question, ready: set[str], *, slow: bool) -> Answer | None:
        """None if the client may ask again. What was `ready` may have been evicted."""
        started = self._now()
        try:
            async with asyncio.timeout(self.ended_s):
                found = await (post_slowly(self.client, body) if slow else self.client.post(body))
        except (aiohttp.ClientError, BrokenOff, TimeoutError) as error:
            self._note_lost(question.right, error, started)
            return None
        if found.status == 200 and not any("error" in event for event in found.events):
            return found
        code = found.error["code"]
        self.counts[code] += 1
        if NO_PROCESSOR in found.error["message"] and self._is_disturbed(started):  # a real worker would answer
            return None
        if self._is_allowed(code, started) and (found.status != 503 or "retry-after" in found.headers):
            return None
        if code != "unknown_media_uuid" or (ready is self.ready and not self._num_hoards):
            self._wrong(question, f"{code} is not allowed: {found.error}")
        return found

    def _note_lost(self, what: str, error: Exception, started: float) -> None:
        """A request without a response, or without all of one."""
        is_late = isinstance(error, TimeoutError)
        self.counts["late" if is_late else CONNECTION_LOST] += 1
        if is_late or not self._is_allowed(CONNECTION_LOST, started):
            late = f" (not ended within {self.ended_s:g} s)" if is_late else ""
            self.problems.append(f"{started:.2f}-{self._now():.2f} {what}: {error!r}{late}")

    def _is_disturbed(self, started: float) -> bool:
        """Whether anything was done to the host since."""
        return any(allowed.until >= started for allowed in self._allowed)

    def _is_allowed(self, code: str, started: float) -> bool:
        return any(code in allowed.codes and allowed.until >= started for allowed in self._allowed)

    def _wrong(self, question: Question, what: str) -> None:
        self.problems.append(f"{self._now():.2f} {question.right}: {what}")

    def _judge(self, question: Question, found: Answer, ready: set[str]) -> None:
        right = self._right[question.right]
        try:
            if (ids := choices_of(found)) != right:
                self._wrong(question, f"{'stream' if found.events else 'whole'} {ids} instead of {right}")
        except AssertionError as error:
            self._wrong(question, str(error))
        if found.json is not None and question.media:
            cached = [item["cache"] for item in found.json["medialane"]["items"]]
            missed = [name for name, how in zip(question.media, cached, strict=True) if name in ready and how != "hit"]
            self.counts["hit"] += cached.count("hit")
            for name in missed:
                self._wrong(question, f"{name} was ready and is no hit: {cached}")

    def _note_prefill(self, found: Answer) -> None:
        """Count the answers whose prompts were read from another worker, by the reports of whole answers."""
        if found.json is not None and (prefill := found.json["medialane"].get("prefill")) is not None:
            self.counts[f"prefill {prefill['outcome']}"] += 1
            self.counts["transferred"] += prefill.get("transferred_tokens", 0) > 0

    def _num_fetched(self, question: Question) -> int:
        return sum(request.path in question.media for request in self.origin.requests)


async def _by_clients(asked: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await all of them, as many at a time as there are clients."""
    running = asyncio.Semaphore(NUM_CLIENTS)

    async def ask(one: Coroutine[Any, Any, None]) -> None:
        async with running:
            await one

    async with asyncio.TaskGroup() as tasks:
        for one in asked:
            tasks.create_task(ask(one))


def _body(question: Question, **options: Any) -> dict[str, Any]:
    sampling = {"n": question.n, "temperature": 1, "seed": 5} if question.n > 1 else {}
    return chat(*question.content, max_tokens=question.max_tokens, **sampling, **question.options, **options)


def choices_of(found: Answer) -> list[list[int]]:
    """The token ids of each choice. Raises AssertionError if one of them has not ended, or more than once."""
    choices = [choice for event in found.events or [found.json] for choice in event["choices"]]
    ids: dict[int, list[int]] = {}
    ends: Counter[int] = Counter()
    for choice in choices:
        assert not ends[choice["index"]] or not choice.get("token_ids"), f"tokens after the end: {choice}"
        ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
        ends[choice["index"]] += choice["finish_reason"] is not None
    assert ends == dict.fromkeys(ids, 1), f"choices must end once: {ends}"
    return [ids[index] for index in sorted(ids)]


async def post_slowly(client: OpenAiHttp, body: dict[str, Any]) -> Answer:
    """A client that sends its body in pieces and reads its answer in pieces."""
    data = json.dumps({"model": client.model, **body}).encode()
    size = len(data) // _NUM_PIECES + 1

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), size):
            yield data[start : start + size]
            await asyncio.sleep(_SLOW_S)  # time: a slow client's

    headers = {"Content-Type": "application/json"}
    async with (
        client.session(**headers) as session,
        session.post(f"{client.base_url}/v1/chat/completions", data=pieces()) as response,
    ):
        read = bytearray()
        while piece := await response.content.read(2000):
            read += piece
            await asyncio.sleep(_SLOW_S / 10)  # time: a slow client's
        raw = read.decode()
        headers = {name.lower(): value for name, value in response.headers.items()}
        if response.content_type == "text/event-stream":
            return Answer(response.status, None, headers, events_of(raw))
        return Answer(response.status, json.loads(raw), headers, [])


def events_of(raw: str) -> list[Any]:
    found = [line.removeprefix("data: ") for line in raw.split("\n") if line.startswith("data: ")]
    if found[-1:] != ["[DONE]"]:
        raise BrokenOff(f"the stream broke off: {found[-2:]}")
    return list(map(json.loads, found[:-1]))


@asynccontextmanager
async def asking(
    client: OpenAiHttp,
    *,
    seed: int,
    num_new: int,
    with_embeds: bool = True,
    ended_s: float = 120.0,
    right: OpenAiHttp | None = None,
) -> AsyncIterator[MixedLoad]:
    """A load that runs during the block; what it has found is checked at its end. `right` is another server of the same
    model, whose answers are right; otherwise `client` asks its own before."""
    async with HttpOrigin() as origin:
        for n in range(_NUM_FETCHED):
            body = photo(_FETCHED + n, *_SIZE)
            origin.routes[f"/{n}"] = answer(body=body, content_type="image/jpeg", cache_control="max-age=3600")
        repeated = repeated_questions(origin, with_embeds=with_embeds)
        load = MixedLoad(
            client, origin, random.Random(seed), repeated, new_questions(num_new), ended_s, not with_embeds
        )
        await load.learn(right or client)
        load.start()
        try:
            await load.answers(2 * len(load.repeated))
            load.check()
            yield load
            await load.stop()
            load.check()
        finally:
            load.running.cancel()
            await asyncio.wait([load.running])
