"""The responses of `/health` and `/ready`.

`/health`: 200 with an empty body if all is well, like vLLM; 200 with a JSON body if requests are served with reduced
capacity or features; 503 if no worker is ready. `/ready` is whether to send requests here: it also answers 503 while
the gateway stops. (`/live` answers 200 as long as the event loop runs.) The endpoints are unauthenticated, so they have
counts, not addresses: those are in the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec

from medialane.gateway.workers.pool import WorkerPool


class Health(msgspec.Struct, frozen=True):
    """`ok`, `degraded` (requests are served, but something is missing), or `unavailable`; and why."""

    status: Literal["ok", "degraded", "unavailable"]
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join([self.status, *self.problems])

    def response(self) -> tuple[int, bytes]:
        """Return HTTP status and body."""
        body = b"" if self.status == "ok" else msgspec.json.encode(self)
        return 503 if self.status == "unavailable" else 200, body

    def readiness(self, *, is_stopping: bool) -> tuple[int, bytes]:
        """Return HTTP status and body of `/ready`."""
        if is_stopping:
            return Health("unavailable", ("this gateway is stopping",)).response()
        return (200, b"") if self.status != "unavailable" else self.response()


def health_of(workers: WorkerPool | None, problems: Iterable[str | None] = ()) -> Health:
    """Return the gateway's current health. `problems` are what other components report; None entries are ignored.
    `workers` is None if it needs none."""
    own = () if workers is None else _worker_problems(workers)
    all_problems = tuple(problem for problem in (*own, *problems) if problem is not None)
    if workers is not None and not workers.num_ready:
        return Health("unavailable", all_problems)
    return Health("degraded" if all_problems else "ok", all_problems)


def _worker_problems(workers: WorkerPool) -> Iterable[str]:
    total, encoders = len(workers.of_role("worker")), workers.of_role("encoder")
    if not total:
        yield "no worker has joined"
    if total > workers.num_ready:
        yield f"{workers.num_ready} of {total} workers are ready"
    num_encoders_ready = sum(link.is_ready for link in encoders)
    if len(encoders) > num_encoders_ready:
        yield f"{num_encoders_ready} of {len(encoders)} encoders are ready"
    states = Counter(link.state for link in workers.links.values())
    for state in ("stalled", "draining"):
        if num := states[state]:
            verb, log = "is" if num == 1 else "are", " (see its log)" if state == "stalled" else ""
            yield f"{num} of {len(workers.links)} workers {verb} {state}{log}"
    reports = [link.client.reports for link in workers.links.values() if link.client is not None]
    if num_unknown := sum(each.has_unknown_blocks for each in reports):
        what = "get requests without regard to their KV caches (see its log)"
        yield f"{num_unknown} of {len(workers.links)} workers {what}"
    if num_restarting := sum(each.has_failing_tasks for each in reports):
        yield f"{num_restarting} of {len(workers.links)} workers had to restart background tasks (see its log)"
    if workers.num_failing:
        what = "refuse this gateway, are refused, or cannot be connected to (see its log)"
        yield f"{workers.num_failing} of {len(workers.links)} workers {what}"
