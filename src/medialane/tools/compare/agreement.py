"""Whether the answers of two servers are equal, and where they part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Literal

import msgspec

from medialane.tools.check.results import compare
from medialane.tools.compare.reply import Reply
from medialane.tools.compare.traffic import Traffic

#: `equal`: every token, or the text of servers that return no token ids; `parts`: the beginning is equal; `refused`:
#: by both with the same status; `answered_by_one`: an error of the other, or another status.
Verdict = Literal["equal", "parts", "refused", "answered_by_one"]

_MAX_PARTINGS = 100
_SHOWN_CHARS = 160


class Parting(msgspec.Struct, frozen=True, omit_defaults=True):
    """Two answers to one request that differ: after `position` tokens (characters without token ids) of `length`. The
    texts go on from some words before that."""

    id: str
    verdict: Verdict
    detail: str
    position: int = 0
    length: int = 0
    common: str = ""
    baseline: str = ""
    other: str = ""


class Agreement(msgspec.Struct, frozen=True):
    """Of `num_compared` requests that both servers have replied to. `common_share` is how much of the answers, in
    tokens, comes before they part."""

    num_compared: int
    counts: dict[Verdict, int]
    common_share: float
    partings: tuple[Parting, ...]

    @property
    def num_answered(self) -> int:
        """Of at least one server."""
        return self.num_compared - self.counts.get("refused", 0)

    @property
    def equal_share(self) -> float:
        """Of what was answered."""
        return self.counts.get("equal", 0) / self.num_answered if self.num_answered else 1.0


def agreement(traffic: Traffic, baseline: Iterable[Reply], other: Iterable[Reply]) -> Agreement:
    """Compare the replies to the same requests."""
    theirs = {reply.number: reply for reply in baseline}
    pairs = [(theirs[reply.number], reply) for reply in other if reply.number in theirs]
    counts: dict[Verdict, int] = {}
    partings, shares = list[Parting](), list[float]()
    for plain, ours in sorted(pairs, key=lambda pair: pair[0].number):
        found = _compared(traffic.requests[plain.number].id, plain, ours)
        counts[found.verdict] = counts.get(found.verdict, 0) + 1
        if found.verdict in ("equal", "parts"):
            shares.append(found.position / found.length if found.length else 1.0)
        if found.verdict in ("parts", "answered_by_one") and len(partings) < _MAX_PARTINGS:
            partings.append(found)
    return Agreement(len(pairs), counts, sum(shares) / len(shares) if shares else 1.0, tuple(partings))


def _compared(name: str, plain: Reply, ours: Reply) -> Parting:
    if plain.succeeded and ours.succeeded:
        return _answers(name, plain, ours)
    if plain.status == ours.status and plain.status:
        return Parting(name, "refused", f"{plain.status}: {plain.error}")
    return Parting(name, "answered_by_one", f"{_said(plain)}; the other: {_said(ours)}")


def _answers(name: str, plain: Reply, ours: Reply) -> Parting:
    if plain.document is not None or ours.document is not None:
        difference = compare(ours.document, plain.document)
        if not difference.first and not difference.largest:
            return Parting(name, "equal", "")
        detail = difference.first or f"numbers differ by up to {difference.largest:.3g}"
        return Parting(name, "parts", detail, length=1)
    has_ids = bool(plain.token_ids and ours.token_ids)
    a, b = (plain.token_ids, ours.token_ids) if has_ids else (plain.text, ours.text)
    position, length = _common(a, b), max(len(a), len(b))
    if position == length:
        return Parting(name, "equal", "", position, length)
    unit = "tokens" if has_ids else "characters"
    at = _common(plain.text, ours.text)
    start = max(0, at - _SHOWN_CHARS // 2)
    return Parting(
        name,
        "parts",
        f"equal for {position} of {length} {unit}",
        position,
        length,
        common=plain.text[start:at],
        baseline=plain.text[at : at + _SHOWN_CHARS],
        other=ours.text[at : at + _SHOWN_CHARS],
    )


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how many items both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _said(reply: Reply) -> str:
    if reply.succeeded:
        return "answered"
    return f"{reply.status}: {reply.error}" if reply.status else reply.error
