"""What is done to the processes of a host, when, and to which of them: a pure function of a seed.

A schedule for longer begins with that for shorter, so that a failure of a long run can be repeated by its seed and
the minute in which it happened. `ACTIONS` has all that can be done, and what clients may see of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

CONNECTION_LOST = "connection lost"
#: The codes of errors, by what they say is away.
STORE_LOST = frozenset({"media_store_unavailable"})
#: Only if several workers are away: answers go on at another one.
WORKERS_LOST = frozenset({"worker_lost", "no_worker_ready", "request_ends_workers"})
GATEWAY_LOST = frozenset({CONNECTION_LOST})
NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Action:
    """Something done to processes of a kind (or to what is between two kinds), for a time in seconds if it lasts.
    `seen` are the codes of the errors, and CONNECTION_LOST, that clients may get while it lasts and until the host is
    whole again. If it `loses_worker`, they may also get WORKERS_LOST while another such action has not ended. `weight`
    is how often it is chosen, relative to others."""

    name: str
    kind: str
    seen: frozenset[str] = NOTHING
    least_s: float = 0.0
    most_s: float = 0.0
    weight: int = 1
    loses_worker: bool = False


@dataclass(frozen=True)
class Injection:
    """An action at a time, in seconds from the start. `number` chooses among the processes of its kind, and among
    variants."""

    at_s: float
    action: Action
    seconds: float
    number: int

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.at_s:6.1f} s: {self.action.name} {self.action.kind} (number {self.number}){lasting}"


#: What `kill` costs: the requests of the process, at most.
_KILLED = {
    "warm": NOTHING,
    "preparer": NOTHING,
    "fork server": STORE_LOST,
    "store": STORE_LOST,
    "gateway": GATEWAY_LOST,
    "worker": NOTHING,
}
#: Seconds for which a process is stopped: less than the 10 s after which `serve` replaces it, and than an
#: image's time limit. A worker may be stopped for longer than --worker-stall-timeout.
_STOPPED_S = {
    "warm": 4.0,
    "preparer": 4.0,
    "fork server": 4.0,
    "store": 4.0,
    "gateway": 4.0,
    "worker": 7.0,
    "serve": 4.0,
}

KILLS = tuple(Action("kill", kind, seen, weight=3, loses_worker=kind == "worker") for kind, seen in _KILLED.items())
STOPS = tuple(
    Action("stop", kind, NOTHING, 0.2, most_s, loses_worker=kind == "worker") for kind, most_s in _STOPPED_S.items()
)
#: The engine of a real worker: a process of its own.
ENGINE = (
    Action("kill", "engine", weight=3, loses_worker=True),
    Action("stop", "engine", NOTHING, 0.2, 14.0, loses_worker=True),
)
#: Between two processes, at the kernel: both see the end of the connection.
CUTS = (
    Action("cut", "gateway-worker", weight=4, loses_worker=True),
    Action("cut", "gateway-store", weight=2),
    Action("cut", "worker-store", weight=2),
)
#: Of a host whose prompts are computed by one worker and continued by another one.
SPLIT = (
    *(Action("kill", kind, weight=3, loses_worker=True) for kind in ("prefill", "decode")),
    *(each for each in KILLS if each.kind in ("gateway", "store")),
    *ENGINE,
    *(Action("cut", f"gateway-{kind}", loses_worker=True) for kind in ("prefill", "decode")),
)
#: Bytes that are no message of ours, on connections of their own.
MALFORMED = tuple(Action("malformed", kind, NOTHING, 0.5, 3.0) for kind in ("gateway", "store", "worker"))
OTHERS = (
    Action("overwrite", "store"),
    #: An image that ends its preparer: nobody else's requests notice.
    Action("poison", "preparer", weight=2),
)
#: Requests that hold more media than the arena has room for, for a while.
HOARD = Action("hoard", "arena", frozenset({"arena_full", "media_overloaded"}), 2.0, 6.0, weight=8)
FULL_DISK = Action("fill", "log folder", NOTHING, 1.0, 6.0, weight=6)
CUT_LINK = Action("cut", "link", NOTHING, 0.1, 5.0, weight=2, loses_worker=True)


@dataclass(frozen=True)
class Scenario:
    """`between_s` are the least and most seconds between two injections. Most have ended before the next, some have
    not; with `in_pairs` no more than two, however long a busy machine takes."""

    seed: int
    seconds: float
    actions: tuple[Action, ...]
    between_s: tuple[float, float] = (0.3, 4.0)
    in_pairs: bool = False

    def schedule(self) -> list[Injection]:
        return list(takewhile(lambda injection: injection.at_s < self.seconds, self._injections()))

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}, {self.seconds:g} s:", *map(str, self.schedule())])

    def _injections(self) -> Iterator[Injection]:
        choice, at_s = random.Random(f"chaos {self.seed}"), 0.0
        weights = [action.weight for action in self.actions]
        while True:
            at_s += choice.uniform(*self.between_s)
            (action,) = choice.choices(self.actions, weights)
            yield Injection(at_s, action, choice.uniform(action.least_s, action.most_s), choice.randrange(1000))
