"""Selects the transfer paths that are tried for one request at one worker, in order. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from medialane.core.stage import BEST_STAGE, STAGES, Stage, StageChoice, StageName, TransportName

TransportChoice = Literal["auto", "shm", "inline"]


class TransferPath(msgspec.Struct, frozen=True):
    """One stage and one transport."""

    stage: StageName
    transport: TransportName

    def __str__(self) -> str:
        return f"{self.stage}/{self.transport}"


def transfer_paths(
    stage: StageChoice, transport: TransportChoice, *, same_host: bool, same_processor: bool, prepared: bool
) -> tuple[TransferPath, ...]:
    """Return the transfer paths to try, best first; empty if the configured choice is impossible at this worker.

    `same_host`: the worker has proved that it maps our arena. `same_processor`: its processor settings equal ours, so
    our features are equivalent to its own. `prepared`: the request has features.
    """

    def is_possible(found: Stage) -> bool:
        return not found.same_processor or (same_processor and prepared)

    return tuple(
        TransferPath(found.name, name)
        for found in _stages(stage, is_possible)
        for name in _transports(found, transport, same_host=same_host)
    )


def _stages(choice: StageChoice, is_possible: Callable[[Stage], bool]) -> Iterator[Stage]:
    if choice != "auto":
        yield from filter(is_possible, [STAGES[choice]])
        return
    name: StageName | None = BEST_STAGE
    while name is not None:
        stage = STAGES[name]
        if is_possible(stage):
            yield stage
            name = stage.fallback
        else:
            name = stage.instead


def _transports(stage: Stage, choice: TransportChoice, *, same_host: bool) -> tuple[TransportName, ...]:
    found = tuple(name for name in stage.transports if choice in ("auto", name) and (same_host or name != "shm"))
    return found or stage.last_resort
