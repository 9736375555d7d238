"""A case of the check: a request that plain vLLM and medialane are sent alike, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Part of a message's content: text, or one item of media.
Part = Mapping[str, Any]

#: Most items of each modality that the model accepts in a prompt; a modality that it does not have is missing.
Limits = Mapping[str, int]


@dataclass(frozen=True, repr=False)
class Upload:
    """A file of a multipart form."""

    name: str
    data: bytes
    media_type: str


@dataclass(frozen=True, repr=False)
class CaseRequest:
    """What is posted to `path`: JSON, or, if `body` is None, a multipart form. The model's name is
    filled in where there is none."""

    path: str
    body: Mapping[str, Any] | None = None
    form: tuple[tuple[str, str | Upload], ...] = ()


@dataclass(frozen=True)
class Case:
    """One request under a name that is unique in its kind.

    `make` builds the request when its turn comes. `varies` names an earlier case that this one is a variation of: if
    plain vLLM's answers to both are equal, the variation has no effect on the model, and medialane may refuse it.
    `is_essential`: also in the small matrix.
    """

    name: str
    make: Callable[[], CaseRequest]
    varies: str = ""
    is_essential: bool = False


@dataclass(frozen=True)
class Answer:
    """A whole response. `document` is its JSON, or its text; `events` are a stream's, without `[DONE]`.

    `report` is medialane's report on the request, if it was asked for one. Status 0: there was no response, and
    `document` says why.
    """

    status: int
    document: Any
    events: tuple[Any, ...] = ()
    report: Mapping[str, Any] = field(default_factory=dict)

    @property
    def succeeded(self) -> bool:
        return self.status == 200

    @property
    def error(self) -> str:
        """The text of an error; empty if it is none."""
        return "" if self.succeeded else " ".join(str(reason_in(self.document)).split())


def reason_in(document: Any) -> Any:
    """Return what an error says in any form that vLLM has; `document` itself if it has none of them."""
    for name in ("error", "message", "detail"):
        if isinstance(document, dict) and name in document:
            document = document[name]
    return document


def whole_document(answer: Answer) -> Any:
    """Return what is compared of a successful answer: all of it."""
    return list(answer.events) if answer.events else answer.document


@dataclass(frozen=True)
class EndpointKind:
    """A kind of endpoint: which models have it, how it is asked, and what is compared of its answers.

    A model has it if plain vLLM's app has `route`. `ask` makes a request with a message of these parts, by which the
    model's limits are learned; None for endpoints without messages, whose limits are empty. `cases` makes the matrix
    from the limits. `compared` is what must be equal of two successful answers; members of objects that differ between
    servers by their nature (names, dates, cache hits) are left out anyway.
    """

    name: str
    route: str
    cases: Callable[[Limits], Iterable[Case]]
    ask: Callable[[list[Part]], CaseRequest] | None = None
    compared: Callable[[Answer], Any] = whole_document
