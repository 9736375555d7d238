"""Requests whose worker is lost in the middle of their answers, and what a client has of a stream in the end, however
it was cut into events."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from medialane_process import MedialaneProcess, kill
from openai_http import CHAT, Answer, OpenAiHttp, load, stream_events
from process_tree import descendants

from waiting import eventually

#: Done to the worker of this name.
Fault = Callable[[str], Awaitable[None]]

#: Tokens before the first fault: late enough that text is held back and blocks of the answer are full.
BEFORE_FAULT = 100

#: A whole answer has some hundred tokens after this, and some thousand are left.
MIDDLE_S = 0.5
RESTART_S = 240

_TEXTS = ("content", "reasoning", "reasoning_content")
#: Of requests asked together some are at the other worker, whose turn is next. On a busy machine answers may end
#: before the kill, in particular the last ones, which have a worker for themselves.
_MOST_ROUNDS = 6


class Asked(NamedTuple):
    """A request to this gateway."""

    client: OpenAiHttp
    body: dict[str, Any]
    path: str = CHAT

    async def undisturbed(self) -> Answer:
        return await self.client.succeed(self.body, self.path)


async def all_interrupted(serve: MedialaneProcess, asked: Mapping[str, Asked]) -> dict[str, Answer]:
    """Send these requests together, and kill the worker of most of them when each is in its middle; then again those
    that were at the other worker, or had ended, until each has lost its worker once."""
    answers: dict[str, Answer] = {}
    for _ in range(_MOST_ROUNDS):
        left = {name: one for name, one in asked.items() if name not in answers}
        for client in {one.client for one in left.values()}:
            await eventually(lambda client=client: num_ready(client, 2), "both workers are ready", RESTART_S)
        got = await _with_a_kill(serve, left)
        answers |= {name: got[name] for name, one in left.items() if await _has_lost_its_worker(one.client, got[name])}
        if len(answers) == len(asked):
            return answers
    raise AssertionError(f"never interrupted: {asked.keys() - answers.keys()}")


async def _with_a_kill(serve: MedialaneProcess, asked: Mapping[str, Asked]) -> dict[str, Answer]:
    is_in_middle = {name: asyncio.Event() for name in asked}
    tasks = {name: asyncio.create_task(_answer(one, is_in_middle[name])) for name, one in asked.items()}
    for reached in is_in_middle.values():
        await reached.wait()
    at_worker: Counter[str] = Counter()
    addresses = serve.named_workers()  # gateways that are started by hand name workers by these
    for client in {one.client for one in asked.values()}:
        at_worker.update({addresses.get(name, name): number for name, number in (await load(client)).items()})
    ((worker, num_in_flight),) = at_worker.most_common(1)
    if num_in_flight:
        kill(serve.worker_pid(worker))
    return {name: await task for name, task in tasks.items()}


async def _answer(one: Asked, is_in_middle: asyncio.Event) -> Answer:
    try:
        if one.body.get("stream"):
            return await _streamed(one, is_in_middle)
        request = asyncio.create_task(one.client.post(one.body, one.path))
        await asyncio.wait([request], timeout=MIDDLE_S)
        is_in_middle.set()
        return await request
    finally:
        is_in_middle.set()


async def _streamed(one: Asked, is_in_middle: asyncio.Event) -> Answer:
    events, num_tokens = [], 0
    async with one.client.opened(one.body, one.path) as response:
        async for event in stream_events(response):
            events.append(event)
            num_tokens += num_tokens_of(event)
            if num_tokens >= BEFORE_FAULT:
                is_in_middle.set()
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(response.status, None, headers, events)


async def _has_lost_its_worker(client: OpenAiHttp, answer: Answer) -> bool:
    """Whether one of its attempts, or all of it, has ended with the error that says so."""
    if answer.events and (error := answer.events[-1].get("error")):
        return error["code"] == "worker_lost"
    own = hashlib.sha256(answer.headers["x-request-id"].encode()).hexdigest()
    decisions = (await client.get("/medialane/decisions?limit=256")).json["decisions"]
    errors = [found["error"] for found in decisions if found["request_id_sha256"] == own]
    assert errors, "no decision of the request"
    return "worker_lost" in errors


def num_tokens_of(event: dict[str, Any]) -> int:
    """1 of an event without token ids."""
    return sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ())) or 1


async def num_ready(client: OpenAiHttp, number: int) -> bool:
    return (await client.metrics()).value("medialane_worker_state", state="ready") == number


async def interrupted(client: OpenAiHttp, body: dict[str, Any], *faults: Fault, path: str = CHAT) -> Answer:
    """Stream the only request in flight. After BEFORE_FAULT tokens, or events without token ids, the first fault
    happens to its worker, the next ones after BEFORE_FAULT more each."""
    events, num_tokens, todo = [], 0, list(faults)
    async with client.opened({**body, "stream": True}, path) as response:
        async for event in stream_events(response):
            events.append(event)
            num_tokens += num_tokens_of(event)
            if todo and num_tokens >= BEFORE_FAULT * (1 + len(faults) - len(todo)):
                await todo.pop(0)(await its_worker(client))
    assert not todo, f"the stream has ended after {num_tokens} tokens: {events[-3:]}"
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(response.status, None, headers, events)


async def its_worker(client: OpenAiHttp) -> str:
    """The worker of the requests in flight: of the only one, or of most of one client's."""
    found: dict[str, float] = {}

    async def is_known() -> bool:
        nonlocal found
        found = await load(client)
        return any(found.values())

    await eventually(is_known, "a request is at a worker")
    return max(found, key=lambda worker: found[worker])


def killing(serve: MedialaneProcess) -> Fault:
    async def fault(worker: str) -> None:
        kill(serve.worker_pid(worker))

    return fault


def killing_engine(serve: MedialaneProcess) -> Fault:
    async def fault(worker: str) -> None:
        for pid in descendants(serve.worker_pid(worker)):
            kill(pid)

    return fault


def whole(answer: Answer) -> dict[str, Any]:
    """What a client has of a stream of chat completions or completions."""
    choices: dict[int, dict[str, Any]] = {}
    found: dict[str, Any] = {"choices": choices, "usage": None, "error": None, "prompts": []}
    for event in answer.events:
        if event.get("prompt_token_ids"):
            found["prompts"].append(event["prompt_token_ids"])  # once for each choice
        for choice in event.get("choices", ()):
            _add(choices.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": {}, "tools": {}}), choice)
        found["usage"] = event.get("usage") or found["usage"]
        found["error"] = event.get("error") or found["error"]
    return found


def _add(found: dict[str, Any], choice: dict[str, Any]) -> None:
    assert "finish_reason" not in found, "an event follows the last one of its choice"
    delta = choice.get("delta", {})
    found["text"] += choice.get("text", "")
    found["ids"] += choice.get("token_ids") or ()
    for name in _TEXTS:
        found[name] = found.get(name, "") + (delta.get(name) or "")
    for name, values in (choice.get("logprobs") or {}).items():
        found["logprobs"].setdefault(name, []).extend(values or ())
    for call in delta.get("tool_calls") or ():
        so_far = found["tools"].setdefault(call["index"], {"name": "", "arguments": ""})
        for name in so_far:
            so_far[name] += call["function"].get(name) or ""
    if choice.get("prompt_token_ids"):
        assert "prompt_token_ids" not in found, "sent twice"
        found["prompt_token_ids"] = choice["prompt_token_ids"]
    if choice.get("finish_reason"):
        found["finish_reason"], found["stop_reason"] = choice["finish_reason"], choice.get("stop_reason")
