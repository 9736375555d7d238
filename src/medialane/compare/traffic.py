"""Traffic to be replayed: requests that are made when their turn comes, so that no file has to fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, repr=False)
class Ask:
    """What is posted to `path`. The file of a form is its member `file_url`, a data: URL."""

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class TrafficRequest:
    """One request. `at_s` is when it is sent, in seconds since the first one, None if the file has no times. `make`
    may read files and generate media: not for the event loop. It raises UnusableLine."""

    id: str
    at_s: float | None
    make: Callable[[], Ask]


@dataclass(frozen=True)
class Traffic:
    """The requests of a file in the order of their times; `notes` say what of them is made up or left out. `digest` is
    that of the file."""

    format: str
    requests: tuple[TrafficRequest, ...]
    digest: str
    notes: tuple[str, ...] = ()

    @property
    def is_timed(self) -> bool:
        return all(request.at_s is not None for request in self.requests)

    @property
    def duration_s(self) -> float:
        return max((request.at_s or 0.0 for request in self.requests), default=0.0)


class UnusableLine(Exception):
    """A line of a file that is no request of its format; the message says which and why."""
