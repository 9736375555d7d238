"""Other forms of requests to pooling models: texts, token ids and batches, encodings of numbers, queries with media.

Cases of endpoints that the model has not are sent, too: both servers answer 404.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from medialane.tools.check.case import Case, EndpointKind, Limits, Part, Request
from medialane.tools.check.media import ONE, OTHER, text

_ASK = text("What is it?")

#: Endpoints whose requests have messages.
_CHATS = ("/pooling", "/v1/embeddings", "/classify")

#: Modalities that a query or document can have.
_SCORED = ("image", "video")


def _chat(path: str, *makers: Callable[[], Part] | Part, **options: Any) -> Request:
    return Request(path, {"messages": _messages(*makers), **options})


def _messages(*makers: Callable[[], Part] | Part) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [maker() if callable(maker) else maker for maker in makers]}]


def _cases(limits: Limits) -> Iterator[Case]:
    for path in _CHATS:
        yield Case(f"{path}: text", partial(Request, path, {"input": "A boat in a harbour."}), is_essential=True)
        yield Case(f"{path}: two texts", partial(Request, path, {"input": ["A boat.", "Seven children."]}))
        yield Case(f"{path}: token ids", partial(Request, path, {"input": [[1, 2, 3], [4, 5]]}))
        yield Case(f"{path}: truncated", partial(Request, path, {"input": "A boat.", "truncate_prompt_tokens": 2}))
        for modality, one in ONE.items():
            if modality in limits:
                yield Case(f"{path}: {modality} in base64", partial(_chat, path, one, encoding_format="base64"))
                yield Case(f"{path}: {modality}, not normalized", partial(_chat, path, one, use_activation=False))
                yield Case(f"{path}: {modality} that does not fit", partial(_chat, path, one, truncate_prompt_tokens=4))
    yield Case("/v1/embeddings: columns", partial(Request, "/v1/embeddings", {"input": "A boat.", "dimensions": 8}))
    yield from _scores(limits)
    if "image" in limits:
        yield from _batches()


def _scores(limits: Limits) -> Iterator[Case]:
    texts = {"queries": "a boat", "documents": ["A boat in a harbour.", "Seven children."]}
    yield Case("/score: texts", partial(Request, "/score", texts), is_essential=True)
    reranked = {"query": "a boat", "documents": texts["documents"], "top_n": 1}
    yield Case("/rerank: texts", partial(Request, "/rerank", reranked), is_essential=True)
    for modality in _SCORED:
        if modality in limits:
            one, other = ONE[modality], OTHER[modality]
            yield Case(f"/score: query with {modality}", partial(_scored, one, other), is_essential=True)
            yield Case(f"/v1/rerank: {modality}s", partial(_reranked, one, other), is_essential=True)


def _scored(one: Callable[[], Part], other: Callable[[], Part]) -> Request:
    return Request("/score", {"queries": _content(one), "documents": [_content(other), "a boat"]})


def _reranked(one: Callable[[], Part], other: Callable[[], Part]) -> Request:
    documents = [_content(one), "a boat", _content(other)]
    return Request("/v1/rerank", {"query": "a boat", "documents": documents})


def _content(maker: Callable[[], Part]) -> dict[str, Any]:
    return {"content": [maker()]}


def _batches() -> Iterator[Case]:
    one, other = ONE["image"], OTHER["image"]
    yield Case(
        "/v1/embeddings: batch of images",
        lambda: Request("/v1/embeddings", {"messages": [_messages(one), _messages(other, _ASK)]}),
        is_essential=True,
    )
    yield Case("/v1/embeddings: image in input", lambda: Request("/v1/embeddings", {"input": _messages(one, _ASK)}))
    yield Case("/v2/embed: images", lambda: Request("/v2/embed", {"images": [one()["image_url"]["url"]]}))


POOLING_INPUTS = EndpointKind("pooling inputs", "/pooling", _cases, ask=lambda parts: _chat("/pooling", *parts))
