"""Streams whose worker is lost after some tokens, and what a client has of a stream in the end, however it was cut into
events."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from medialane_process import MedialaneProcess, kill
from openai_http import CHAT, Answer, OpenAiHttp, load
from process_tree import descendants

from waiting import eventually

#: Done to the worker of this name.
Fault = Callable[[str], Awaitable[None]]

#: Tokens before the first fault: late enough that text is held back and blocks of the answer are full.
SEAM = 100

_TEXTS = ("content", "reasoning", "reasoning_content")


async def interrupted(client: OpenAiHttp, body: dict[str, Any], *faults: Fault, path: str = CHAT) -> Answer:
    """Stream the only request in flight. After SEAM tokens, or events without token ids, the first fault happens to its
    worker, the next ones after SEAM more each."""
    events, num_tokens, todo = [], 0, list(faults)
    async with client.opened({**body, "stream": True}, path) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            events.append(event)
            num_tokens += sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ())) or 1
            if todo and num_tokens >= SEAM * (1 + len(faults) - len(todo)):
                await todo.pop(0)(await its_worker(client))
    assert not todo, f"the stream has ended after {num_tokens} tokens: {events[-3:]}"
    return Answer(response.status, None, dict(response.headers), events)


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
