"""What a server replied to one request: what was measured, and what is compared; read from a stream or a document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from medialane.tools.check.case import reason_in

#: Members of `Reply`.
Fields = dict[str, Any]

#: Endpoints whose events have a type: Responses, and Anthropic's messages. Those of others have choices.
TYPED: Final = frozenset(("/v1/responses", "/v1/messages"))
_DONE: Final = b"[DONE]"
#: The last events of streams that do not end with DONE.
_LAST: Final = frozenset(("response.completed", "response.incomplete", "message_stop", "medialane.report"))
_MAX_ERROR_CHARS: Final = 300


class Served(msgspec.Struct, frozen=True, omit_defaults=True):
    """What medialane reports of a request: how each item was found, what became of its embedding, the durations of the
    steps, and the bytes that were copied on the way to the engine."""

    caches: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    stage: str = ""
    transport: str = ""
    copied_bytes: int = 0
    times_ms: dict[str, float] = {}
    prompt_tokens: int = 0
    cached_tokens: int | None = None

    @classmethod
    def of(cls, report: dict[str, Any]) -> Served:
        items, routing = report.get("items", ()), report.get("routing") or {}
        return cls(
            caches=tuple(item["cache"] for item in items),
            embeddings=tuple(item["embedding"] for item in items if "embedding" in item),
            stage=report.get("stage") or "",
            transport=report.get("transport") or "",
            copied_bytes=report.get("copied_bytes", 0),
            times_ms=report.get("times_ms", {}),
            prompt_tokens=routing.get("num_tokens", 0),
            cached_tokens=routing.get("engine_cached_tokens"),
        )


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """`number` is that of the request. Status 0: there was no whole response, and `error` says why.

    `sent_s` is when it was sent, in seconds of the turn, `late_s` how much later than it should have been. `ttft_s` and
    `tpot_s` (time per output token after the first) are None where nothing was streamed. `token_ids` are those of the
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
