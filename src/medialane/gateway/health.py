"""What `/health` answers.

200 with an empty body where all is well, as vLLM answers; 200 with a JSON body where requests are served and something
is missing; 503 where no worker takes requests. Anybody may ask, so there are counts and no addresses: the log has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from medialane.gateway.workers import WorkerPool


class Health(msgspec.Struct, frozen=True):
    """`ok`, `degraded` (requests are served, with less than there should be), or `unavailable`; and why."""

    status: Literal["ok", "degraded", "unavailable"]
    problems: tuple[str, ...] = ()

    def response(self) -> tuple[int, bytes]:
        """HTTP status and body."""
        body = b"" if self.status == "ok" else msgspec.json.encode(self)
        return 503 if self.status == "unavailable" else 200, body


def health_of(workers: WorkerPool, problems: Iterable[str | None] = ()) -> Health:
    """How the gateway is now; `problems` are those of its other parts, None where there is none."""
    found = tuple(problem for problem in (*_of(workers), *problems) if problem is not None)
    if not workers.num_ready:
        return Health("unavailable", found)
    return Health("degraded" if found else "ok", found)


def _of(workers: WorkerPool) -> Iterable[str]:
    if (total := len(workers.links)) > workers.num_ready:
        yield f"{workers.num_ready} of {total} workers are ready"
    if workers.num_failing:
        yield f"{workers.num_failing} of {total} workers refuse this gateway or cannot be connected to (see its log)"
