"""Which ways of handing over are tried for one request at one worker, in order. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from medialane.core.request import Stage, TransportName

StageChoice = Literal["auto", "features", "url"]
TransportChoice = Literal["auto", "shm", "inline"]


class Way(msgspec.Struct, frozen=True):
    """One stage and, for features, one transport."""

    stage: Stage
    transport: TransportName | None = None

    def __str__(self) -> str:
        return self.stage if self.transport is None else f"{self.stage}/{self.transport}"


def ways(
    stage: StageChoice, transport: TransportChoice, *, same_host: bool, same_processor: bool, prepared: bool
) -> tuple[Way, ...]:
    """The ways to try, best first; empty when the operator's choice is impossible at this worker.

    `same_host`: the worker proved that it maps our arena. `same_processor`: its processor settings equal ours, so our
    features mean to its engine what its own would. `prepared`: the request has features.
    """
    found: list[Way] = []
    if stage != "url" and same_processor and prepared:
        if transport in ("auto", "shm") and same_host:
            found.append(Way("features", "shm"))
        if transport in ("auto", "inline"):
            found.append(Way("features", "inline"))
    if stage != "features":
        found.append(Way("url"))
    return tuple(found)
