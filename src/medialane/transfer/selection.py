"""Which ways of handing over are tried for one request at one worker, in order. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from medialane.core.request import Stage, TransportName

StageChoice = Literal["auto", "features", "decoded", "url"]
TransportChoice = Literal["auto", "shm", "inline"]


class Way(msgspec.Struct, frozen=True):
    """One stage and one transport."""

    stage: Stage
    transport: TransportName

    def __str__(self) -> str:
        return f"{self.stage}/{self.transport}"


def ways(
    stage: StageChoice, transport: TransportChoice, *, same_host: bool, same_processor: bool, prepared: bool
) -> tuple[Way, ...]:
    """The ways to try, best first; empty when the operator's choice is impossible at this worker.

    `same_host`: the worker proved that it maps our arena. `same_processor`: its processor settings equal ours, so our
    features mean to its engine what its own would. `prepared`: the request has features.
    """
    transports = _transports(transport, same_host=same_host)
    found: list[Way] = []
    if stage in ("auto", "features") and same_processor and prepared:
        found += [Way("features", t) for t in transports]
    # What is decoded means the same to every worker: the next best where features do not.
    if stage == "decoded" or (stage == "auto" and not found):
        found += [Way("decoded", t) for t in transports]
    if stage in ("auto", "url"):
        # The last resort, which no transport is too good for: encoded bytes are few.
        found += [Way("url", t) for t in transports or ("inline",)]
    return tuple(found)


def _transports(choice: TransportChoice, *, same_host: bool) -> tuple[TransportName, ...]:
    names: tuple[TransportName, ...] = ("shm", "inline") if same_host else ("inline",)
    return tuple(name for name in names if choice in ("auto", name))
