"""Sends requests to one server, to its model, streamed where they can be, and greedy; and reads its replies: what was
measured of each, and what is compared. Nothing is parsed before a response has ended."""

from __future__ import annotations

import io
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from pybase64 import b64decode

from medialane.tools.check.case import reason_in
from medialane.tools.check.client import get
from medialane.tools.compare.traffic import Ask, UnusableLine
from medialane.tools.http_failure import describe_failure
from medialane.types.errors import StartupFailed

#: Members of `Reply`.
Fields = dict[str, Any]

#: Endpoints whose events have a type: Responses, and Anthropic's messages. Events of others have choices.
TYPED: Final = frozenset(("/v1/responses", "/v1/messages"))
_DONE: Final = b"[DONE]"
#: The last events of streams that do not end with DONE.
_LAST: Final = frozenset(("response.completed", "response.incomplete", "message_stop", "medialane.report"))
_MAX_ERROR_CHARS: Final = 300
#: Of a line of a stream: many logprobs.
_LINE_BYTES: Final = 4 << 20
_EVENT: Final = b"data: "
#: Asks medialane for its report; other servers ignore it.
_REPORT: Final = {"X-Medialane-Report": "true"}
_TOKEN_IDS: Final = "return_token_ids"  # noqa: S105 - a member of vLLM's requests
_WARM_UP: Final = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
_CHAT: Final = "/v1/chat/completions"
#: Endpoints with choices, for which vLLM returns token ids.
_WITH_CHOICES: Final = frozenset((_CHAT, "/v1/completions"))
_FILE: Final = "file_url"
#: vLLM's metrics, which medialane's gateway has as well, by our names for them.
_COUNTERS: Final = {
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:mm_cache_queries_total": "mm_queries",
    "vllm:mm_cache_hits_total": "mm_hits",
    "vllm:num_preemptions_total": "preemptions",
}
#: Members that sampling needs, and that a greedy request may not have, or not with any value.
_OF_SAMPLING: Final = frozenset(("top_p", "top_k", "min_p", "seed", "best_of"))


class Served(msgspec.Struct, frozen=True, omit_defaults=True):
    """What medialane reports of a request: how each item was found, what became of its embedding, the durations of the
    steps, and the bytes that were copied on the way to the engine."""

    caches: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    stage: str = ""
    transport: str = ""
    copied_bytes: int = 0
    times_ms: dict[str, float] = {}

    @classmethod
    def of(cls, report: dict[str, Any]) -> Served:
        items = report.get("items", ())
        return cls(
            caches=tuple(item["cache"] for item in items),
            embeddings=tuple(item["embedding"] for item in items if "embedding" in item),
            stage=report.get("stage") or "",
            transport=report.get("transport") or "",
            copied_bytes=report.get("copied_bytes", 0),
            times_ms=report.get("times_ms", {}),
        )


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """`number` is the request's. Status 0: there was no whole response, and `error` says why.

    `sent_s` is when it was sent, in seconds of the turn, `late_s` how much later than it should have been. `ttft_s` and
    `tpot_s` (time per output token after the first) are None where nothing was streamed. `token_ids` are the ids of the
    first choice, `text` is what it says; `document` is an answer that is no text, such as embeddings.
    """

    number: int
    status: int
    sent_s: float
    seconds: float
    late_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    num_tokens: int = 0
    prompt_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    document: Any = None
    error: str = ""
    served: Served | None = None

    @property
    def succeeded(self) -> bool:
        return self.status == 200


class CompareClient:
    """A server, by its address without /v1. Use it in `async with opened(...)`.

    `model` is the name of the served one. `as_sent`: requests are sampled and streamed as they are, so that answers
    need not be equal. `has_token_ids`: the server returns token ids if it is asked for them."""

    def __init__(
        self, session: aiohttp.ClientSession, base_url: str, *, model: str, as_sent: bool, has_token_ids: bool
    ) -> None:
        self._session = session
        self._base_url = base_url
        self._model = model
        self._as_sent = as_sent
        self._has_token_ids = has_token_ids

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, base_url: str, *, api_key: str = "", as_sent: bool = False, timeout_s: float = 600
    ) -> AsyncIterator[CompareClient]:
        """Connect to a ready server, and ask it for its model's name. Raises StartupFailed."""
        headers = _REPORT | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            read_bufsize=_LINE_BYTES,
        ) as session:
            models = await get(session, f"{base_url}/v1/models")
            has_ids = _TOKEN_IDS in await _get_if_any(session, f"{base_url}/openapi.json", default=_TOKEN_IDS)
            model = _served(models, base_url)
            yield cls(session, base_url, model=model, as_sent=as_sent, has_token_ids=has_ids)

    async def warm_up(self) -> None:
        """Have the server answer something small, whatever it answers."""
        body = {**_WARM_UP, "model": self._model}
        try:
            async with self._session.post(self._base_url + _CHAT, json=body) as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError):
            return  # the first request says what is wrong

    async def counters(self, metrics_key: str) -> dict[str, float]:
        """Return the sums of the counters that the server has, by our names for them."""
        headers = {"Authorization": f"Bearer {metrics_key}"} if metrics_key else {}
        page = await _get_if_any(self._session, f"{self._base_url}/metrics", default="", headers=headers)
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if (name := _COUNTERS.get(sample.name)) is not None:
                    found[name] = found.get(name, 0.0) + sample.value
        return found

    def content(self, ask: Ask) -> dict[str, Any]:
        """Return the arguments of aiohttp's request. May take long for large media: not for the event loop. Raises
        UnusableLine."""
        body = self._body(ask)
        if _FILE in body:
            return {"data": _form(body)}
        return {"data": msgspec.json.encode(body), "headers": {"Content-Type": "application/json"}}

    def _body(self, ask: Ask) -> dict[str, Any]:
        body = {**ask.body, "model": self._model}
        body.pop("medialane", None)
        if self._as_sent or ask.path not in _WITH_CHOICES | TYPED:
            return body
        body = {name: value for name, value in body.items() if name not in _OF_SAMPLING}
        body |= {"temperature": 0, "stream": True}
        if body.get("n", 1) != 1:
            body["n"] = 1
        if ask.path in _WITH_CHOICES:
            body["stream_options"] = {"include_usage": True}
            if self._has_token_ids:
                body[_TOKEN_IDS] = True
        return body

    async def ask(self, path: str, content: Mapping[str, Any], number: int, *, began: float) -> Reply:
        """Send a request; a reply without a status if there is no whole response. `began` is the turn's start."""
        sent = time.perf_counter()
        try:
            async with self._session.post(self._base_url + path, **content) as response:
                if response.content_type == "text/event-stream":
                    lines = [
                        (time.perf_counter() - sent, line[len(_EVENT) :].strip())
                        async for line in response.content
                        if line.startswith(_EVENT)
                    ]
                    fields = read_stream(path, lines)
                else:
                    fields = read_document(await response.read())
                status = response.status
        except (aiohttp.ClientError, TimeoutError) as error:
            status, fields = 0, {"error": f"no response: {describe_failure(error)}"}
        except ValueError as error:  # a line or a document that is no JSON
            status, fields = 0, {"error": f"the response cannot be read: {error}"}
        if fields.pop("is_broken_off", False):
            status, fields = 0, {**fields, "error": fields.get("error") or "the stream broke off"}
        return Reply(number, status, sent - began, time.perf_counter() - sent, **fields)


def _form(body: Mapping[str, Any]) -> aiohttp.FormData:
    form = aiohttp.FormData()
    for name, value in body.items():
        if name == _FILE:
            form.add_field("file", io.BytesIO(_file(value)), filename="audio", content_type="application/octet-stream")
            continue
        for each in value if isinstance(value, list) else [value]:
            form.add_field(name, each if isinstance(each, str) else msgspec.json.encode(each).decode())
    return form


def _file(url: object) -> bytes:
    scheme, _, data = url.partition(";base64,") if isinstance(url, str) else ("", "", "")
    try:
        if scheme.startswith("data:"):
            return b64decode(data, validate=True)
    except ValueError as error:
        raise UnusableLine(f"{_FILE} is not base64: {error}") from error
    raise UnusableLine(f"{_FILE} is not a data: URL with base64: files are not fetched")


def _served(models: Any, base_url: str) -> str:
    try:
        return str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise StartupFailed(f"{base_url}/v1/models names no model") from None


async def _get_if_any(
    session: aiohttp.ClientSession, url: str, *, default: str, headers: Mapping[str, str] | None = None
) -> str:
    """Return a page; `default` if the server has none."""
    try:
        async with session.get(url, headers=headers) as response:
            return await response.text() if response.status == 200 else default
    except (aiohttp.ClientError, TimeoutError):
        return default


def read_stream(path: str, lines: Sequence[tuple[float, bytes]]) -> Fields:
    """Return the fields of a reply from the data of its events, each with its time in seconds."""
    events = [(at, json.loads(data)) for at, data in lines if data and data != _DONE]
    is_whole = any(data == _DONE for _, data in lines) or any(event.get("type") in _LAST for _, event in events)
    read = _read_typed if path in TYPED else _read_choices
    fields = read(events)
    if (error := next((_error(event) for _, event in events if "error" in event), "")) or not is_whole:
        fields |= {"is_broken_off": True, "error": error}
    report = next((event["medialane"] for _, event in reversed(events) if "medialane" in event), None)
    if isinstance(report, dict):
        fields["served"] = Served.of(report)
    return fields


def read_document(raw: bytes) -> Fields:
    try:
        document = json.loads(raw)
    except ValueError:
        return {"error": raw[:_MAX_ERROR_CHARS].decode(errors="replace")}
    if not isinstance(document, dict):
        return {"document": document}
    fields: Fields = {}
    report = document.pop("medialane", None)
    if isinstance(report, dict):
        fields["served"] = Served.of(report)
    if error := _error(document):
        return fields | {"error": error}
    usage = document.get("usage") or {}
    fields |= {"prompt_tokens": usage.get("prompt_tokens") or 0, "num_tokens": usage.get("completion_tokens") or 0}
    return fields | _of_document(document)


def _of_document(document: dict[str, Any]) -> Fields:
    """Return what a document answers: the first choice's text, or all of it."""
    choices = document.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        message = choices[0].get("message") or {}
        text = choices[0].get("text") or message.get("content") or ""
        return {"text": text, "token_ids": tuple(choices[0].get("token_ids") or ())}
    if isinstance(document.get("text"), str):  # transcriptions
        return {"text": document["text"]}
    return {"document": document}


def _read_choices(events: Sequence[tuple[float, dict[str, Any]]]) -> Fields:
    """Chat completions and completions."""
    times, token_ids, text = list[float](), list[int](), list[str]()
    usage: dict[str, Any] = {}
    for at, event in events:
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            piece, ids = _piece(choice), choice.get("token_ids") or ()
            if piece or ids:
                times.append(at)
            token_ids += ids
            text.append(piece)
    return _timed(times, len(token_ids) or usage.get("completion_tokens") or 0) | {
        "token_ids": tuple(token_ids),
        "text": "".join(text),
        "prompt_tokens": usage.get("prompt_tokens") or 0,
    }


def _piece(choice: dict[str, Any]) -> str:
    """Return what an event adds to the answer, reasoning and calls of tools included."""
    delta = choice.get("delta") or {}
    calls = "".join(
        f"{call['function'].get('name') or ''}{call['function'].get('arguments') or ''}"
        for call in delta.get("tool_calls") or ()
        if call.get("function")
    )
    reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
    return f"{choice.get('text') or ''}{reasoning}{delta.get('content') or ''}{calls}"


def _read_typed(events: Sequence[tuple[float, dict[str, Any]]]) -> Fields:
    """Responses and Anthropic's messages: events with a type, text in their deltas."""
    times, text = list[float](), list[str]()
    usage: dict[str, Any] = {}
    for at, event in events:
        # Of messages, the tokens of the prompt are in the first event, of responses all are in the last.
        whole = event.get("response") or event.get("message") or {}
        usage |= event.get("usage") or (whole.get("usage") if isinstance(whole, dict) else None) or {}
        delta = event.get("delta")
        piece = _text_of(delta) if isinstance(delta, dict) else delta
        if isinstance(piece, str) and piece:
            times.append(at)
            text.append(piece)
    num_tokens = usage.get("output_tokens") or 0
    return _timed(times, num_tokens) | {"text": "".join(text), "prompt_tokens": usage.get("input_tokens") or 0}


def _text_of(delta: dict[str, Any]) -> str:
    return str(delta.get("text") or delta.get("thinking") or delta.get("partial_json") or "")


def _timed(times: Sequence[float], num_tokens: int) -> Fields:
    tpot = (times[-1] - times[0]) / (num_tokens - 1) if times and num_tokens > 1 else None
    return {"ttft_s": times[0] if times else None, "tpot_s": tpot, "num_tokens": num_tokens}


def _error(document: dict[str, Any]) -> str:
    reason = reason_in(document)
    return "" if reason is document else " ".join(str(reason).split())[:_MAX_ERROR_CHARS]
