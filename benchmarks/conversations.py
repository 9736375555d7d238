"""Users who ask about pictures, one question after the other: each request has the whole conversation so far, as chat
clients send it, with the answers that this server has given."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import aiohttp
import msgspec

from load import cpu_seconds, data_url, random_text
from medialane.testing.sample_media import sample_jpeg

#: The message of a user's turn, encoded once: clients share the cores with the servers.
Question = msgspec.Raw

_DATA = b"data: "


@dataclass(frozen=True)
class Shape:
    """Of conversations; a question has `num_images` new images of this size."""

    num_users: int
    num_turns: int
    num_images: int
    size: tuple[int, int] = (0, 0)
    num_words: int = 20


@dataclass(frozen=True)
class Reply:
    """`ttft_s` ends with the first event of the stream."""

    turn: int
    ttft_s: float
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """Conversations that were held: the replies by user and turn, the time of all, and the servers' CPU time."""

    replies: list[list[Reply]]
    wall_s: float
    cpu_s: float

    @property
    def num_requests(self) -> int:
        return sum(map(len, self.replies))

    def ttft_s(self, is_wanted: Callable[[int], bool]) -> list[float]:
        return [reply.ttft_s for user in self.replies for reply in user if is_wanted(reply.turn)]


def questions(shape: Shape, seed: int) -> list[list[Question]]:
    """Return what each user asks. No two seeds below 10000, users or turns have an image or a question in common."""
    return [
        [_question(shape, (seed * shape.num_users + user) * shape.num_turns + turn) for turn in range(shape.num_turns)]
        for user in range(shape.num_users)
    ]


def _question(shape: Shape, number: int) -> Question:
    images = [
        {"type": "image_url", "image_url": {"url": data_url(sample_jpeg(number * shape.num_images + n, *shape.size))}}
        for n in range(shape.num_images)
    ]
    content = [*images, {"type": "text", "text": random_text(number, shape.num_words)}]
    return msgspec.Raw(msgspec.json.encode({"role": "user", "content": content}))


async def hold(
    base_urls: Sequence[str],
    model: str,
    asked: list[list[Question]],
    *,
    num_tokens: int,
    pids: Callable[[], list[int]],
    begun: list[list[object]] | None = None,
) -> Held:
    """All users at once, each with a connection of its own to each of the servers, which take turns by request.

    `begun` are the messages of each user so far, to which those of these turns are added. Raises RuntimeError for an
    unexpected response.
    """
    servers = cycle(base_urls)
    begun = [[] for _ in asked] if begun is None else begun
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        before, started = cpu_seconds(pids()), time.perf_counter()

        async def user(own: list[Question], messages: list[object]) -> list[Reply]:
            replies = []
            for turn, question in enumerate(own):
                messages.append(question)
                body = _body(model, messages, num_tokens)
                replies.append(await _ask(session, f"{next(servers)}/chat/completions", body, turn))
                messages.append({"role": "assistant", "content": replies[-1].text})
            return replies

        replies = list(await asyncio.gather(*map(user, asked, begun)))
        return Held(replies, time.perf_counter() - started, cpu_seconds(pids()) - before)


def _body(model: str, messages: list[object], num_tokens: int) -> bytes:
    options = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True, "return_token_ids": True}
    return msgspec.json.encode({"model": model, "messages": messages, **options})


async def _ask(session: aiohttp.ClientSession, url: str, body: bytes, turn: int) -> Reply:
    sent = time.perf_counter()
    async with session.post(url, data=body, headers={"content-type": "application/json"}) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: {response.status}: {(await response.text())[:500]}")
        events = aiter(_events(response.content))
        first = await anext(events, b"")
        ttft_s = time.perf_counter() - sent
        rest = [event async for event in events]
    if not rest or rest[-1] != b"[DONE]":
        raise RuntimeError(f"{url}: the stream has ended early: {[first, *rest][-1]!r}")
    choices = [choice for event in (first, *rest[:-1]) for choice in _choices(event)]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    token_ids = tuple(number for choice in choices for number in choice.get("token_ids") or ())
    return Reply(turn, ttft_s, text, token_ids)


async def _events(lines: AsyncIterable[bytes]) -> AsyncIterable[bytes]:
    """Yield the data of each event; comments, which keep a connection alive, are not events."""
    async for line in lines:
        if line.startswith(_DATA):
            yield line[len(_DATA) :].strip()


def _choices(event: bytes) -> Iterator[dict[str, Any]]:
    found = msgspec.json.decode(event)
    if "choices" not in found:
        raise RuntimeError(f"unexpected event: {event[:500]!r}")
    yield from found["choices"]


def share_of_same(one: Held, other: Held) -> float:
    """Return the share of answers with the same text and the same tokens."""
    pairs = [
        (mine, theirs)
        for user, its in zip(one.replies, other.replies, strict=True)
        for mine, theirs in zip(user, its, strict=True)
    ]
    same = [mine.text == theirs.text and mine.token_ids == theirs.token_ids for mine, theirs in pairs]
    return sum(same) / len(same)
