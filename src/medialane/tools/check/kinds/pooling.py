"""Pooling models: embeddings, pooled tensors, classes and scores of text and media. All numbers are compared.

`POOLING_INPUTS` are other forms of requests to them: texts, token ids and batches, encodings of numbers, queries with
media. Cases of endpoints that the model has not are sent, too: both servers answer 404.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations
from typing import Any

from medialane.tools.check.case import Case, CaseRequest, EndpointKind, Limits, Part
from medialane.tools.check.media import (
    MAX_REFUSED_ITEMS,
    MODALITIES,
    ONE,
    OTHER,
    audio,
    damaged,
    image,
    small,
    text,
    video,
)

_ASK = text("What is it?")

#: What makes a request of the parts of a message, or of a document.
_Ask = Callable[[list[Part]], CaseRequest]


def _messages(path: str, parts: list[Part], **options: Any) -> CaseRequest:
    return CaseRequest(path, {"messages": [{"role": "user", "content": parts}], **options})


def _documents(path: str, query: str, parts: list[Part]) -> CaseRequest:
    """Return a request that has a document of these parts, and one of text, scored by a query."""
    return CaseRequest(path, {query: "boats in the harbour", "documents": [{"content": parts}, "a quiet street"]})


def _cases(ask: _Ask, limits: Limits) -> Iterator[Case]:
    yield Case("text only", lambda: ask([text("Say something about pictures.")]), is_essential=True)
    for modality in MODALITIES:
        if modality in limits:
            yield from _usual(ask, modality, limits[modality])
            yield from _PARTICULAR[modality](ask)
        else:
            yield Case(f"{modality}, which the model has not", partial(_of, ask, ONE[modality]))
    for one, other in permutations([modality for modality in MODALITIES if modality in limits], 2):
        yield Case(f"{one}, then {other}", partial(_of, ask, ONE[one], OTHER[other]), is_essential=True)
    yield Case("prompt longer than the model's context", lambda: ask([text("word " * 300_000)]))


def _of(ask: _Ask, *makers: Callable[[], Part]) -> CaseRequest:
    return ask([*(make() for make in makers), _ASK])


def _usual(ask: _Ask, modality: str, limit: int) -> Iterator[Case]:
    one, other = ONE[modality], OTHER[modality]
    yield Case(f"one {modality}", partial(_of, ask, one), is_essential=True)
    yield Case(f"another {modality}", partial(_of, ask, other), varies=f"one {modality}", is_essential=True)
    yield Case(f"{modality} alone", lambda: ask([one()]))
    yield Case(f"{modality} after text", lambda: ask([text("Look at"), other()]), is_essential=True)
    yield Case(f"{modality} again, the same prompt", partial(_of, ask, one), is_essential=True)
    yield Case(f"{modality} that is damaged", lambda: ask([damaged(modality), _ASK]), is_essential=True)
    if limit >= 2:
        yield Case(f"two of {modality}", partial(_of, ask, one, other), is_essential=True)
        yield Case(f"two of {modality}, the other order", partial(_of, ask, other, one))
        yield Case(f"the same {modality} twice", partial(_of, ask, one, one), is_essential=True)
    if limit <= MAX_REFUSED_ITEMS:
        yield Case(
            f"more of {modality} than the limit", lambda: ask([small(modality)] * (limit + 1)), is_essential=True
        )


def _images(ask: _Ask) -> Iterator[Case]:
    for name, (width, height) in {"odd": (57, 31), "tall": (60, 660), "large": (1600, 1200)}.items():
        yield Case(f"image, {name} ({width}x{height})", partial(_of, ask, partial(image, 4, width, height)))


def _videos(ask: _Ask) -> Iterator[Case]:
    yield Case("video, long", partial(_of, ask, partial(video, 4, 150, 160, 120, fps=25)))


def _audio_clips(ask: _Ask) -> Iterator[Case]:
    yield Case("audio, 34 s", partial(_of, ask, partial(audio, 330, 34)))
    yield Case("audio, 0.1 s", partial(_of, ask, partial(audio, 700, 0.1)))


_PARTICULAR: dict[str, Callable[[_Ask], Iterator[Case]]] = {"image": _images, "video": _videos, "audio": _audio_clips}

_ASKS: dict[str, tuple[str, _Ask]] = {
    "embeddings": ("/v1/embeddings", partial(_messages, "/v1/embeddings", encoding_format="float")),
    "pooling": ("/pooling", partial(_messages, "/pooling")),
    "classification": ("/classify", partial(_messages, "/classify")),
    "score": ("/score", partial(_documents, "/score", "queries")),
    "rerank": ("/rerank", partial(_documents, "/rerank", "query")),
}

POOLING = tuple(EndpointKind(name, route, partial(_cases, ask), ask=ask) for name, (route, ask) in _ASKS.items())


#: Endpoints whose requests have messages.
_CHATS = ("/pooling", "/v1/embeddings", "/classify")

#: Modalities that a query or document can have.
_SCORED = ("image", "video")


def _chat(path: str, *makers: Callable[[], Part] | Part, **options: Any) -> CaseRequest:
    return CaseRequest(path, {"messages": _chat_messages(*makers), **options})


def _chat_messages(*makers: Callable[[], Part] | Part) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [maker() if callable(maker) else maker for maker in makers]}]


def _input_cases(limits: Limits) -> Iterator[Case]:
    for path in _CHATS:
        yield Case(f"{path}: text", partial(CaseRequest, path, {"input": "A boat in a harbour."}), is_essential=True)
        yield Case(f"{path}: two texts", partial(CaseRequest, path, {"input": ["A boat.", "Seven children."]}))
        yield Case(f"{path}: token ids", partial(CaseRequest, path, {"input": [[1, 2, 3], [4, 5]]}))
        yield Case(f"{path}: truncated", partial(CaseRequest, path, {"input": "A boat.", "truncate_prompt_tokens": 2}))
        for modality, one in ONE.items():
            if modality in limits:
                yield Case(f"{path}: {modality} in base64", partial(_chat, path, one, encoding_format="base64"))
                yield Case(f"{path}: {modality}, not normalized", partial(_chat, path, one, use_activation=False))
                yield Case(f"{path}: {modality} that does not fit", partial(_chat, path, one, truncate_prompt_tokens=4))
    yield Case("/v1/embeddings: columns", partial(CaseRequest, "/v1/embeddings", {"input": "A boat.", "dimensions": 8}))
    yield from _scores(limits)
    if "image" in limits:
        yield from _batches()


def _scores(limits: Limits) -> Iterator[Case]:
    texts = {"queries": "a boat", "documents": ["A boat in a harbour.", "Seven children."]}
    yield Case("/score: texts", partial(CaseRequest, "/score", texts), is_essential=True)
    reranked = {"query": "a boat", "documents": texts["documents"], "top_n": 1}
    yield Case("/rerank: texts", partial(CaseRequest, "/rerank", reranked), is_essential=True)
    for modality in _SCORED:
        if modality in limits:
            one, other = ONE[modality], OTHER[modality]
            yield Case(f"/score: query with {modality}", partial(_scored, one, other), is_essential=True)
            yield Case(f"/v1/rerank: {modality}s", partial(_reranked, one, other), is_essential=True)


def _scored(one: Callable[[], Part], other: Callable[[], Part]) -> CaseRequest:
    return CaseRequest("/score", {"queries": _content(one), "documents": [_content(other), "a boat"]})


def _reranked(one: Callable[[], Part], other: Callable[[], Part]) -> CaseRequest:
    documents = [_content(one), "a boat", _content(other)]
    return CaseRequest("/v1/rerank", {"query": "a boat", "documents": documents})


def _content(maker: Callable[[], Part]) -> dict[str, Any]:
    return {"content": [maker()]}


def _batches() -> Iterator[Case]:
    one, other = ONE["image"], OTHER["image"]
    yield Case(
        "/v1/embeddings: batch of images",
        lambda: CaseRequest("/v1/embeddings", {"messages": [_chat_messages(one), _chat_messages(other, _ASK)]}),
        is_essential=True,
    )
    yield Case(
        "/v1/embeddings: image in input", lambda: CaseRequest("/v1/embeddings", {"input": _chat_messages(one, _ASK)})
    )
    yield Case("/v2/embed: images", lambda: CaseRequest("/v2/embed", {"images": [one()["image_url"]["url"]]}))


POOLING_INPUTS = EndpointKind("pooling inputs", "/pooling", _input_cases, ask=lambda parts: _chat("/pooling", *parts))
