"""The last routing decisions with their reasons, by the records of requests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice

import msgspec

from medialane.gateway.report import routing_report
from medialane.gateway.requests import RecentRequests, RequestFilter
from medialane.types.errors import InvalidRequest

#: Listed on the page at most: 2 ms of the event loop.
MAX_DECISIONS = 256


def newest_decisions(recent: RecentRequests, gateway: str, number: int) -> list[dict[str, object]]:
    """Return the last decisions of this gateway, those of the newest request first."""
    return list(islice(_decisions(recent, gateway), number))


def decisions_page(recent: RecentRequests, gateway: str, query: Mapping[str, str]) -> bytes:
    """Return the same as JSON, as many as the query wants, with a hash of each id: who may ask for decisions need not
    be the one to see what clients have named their requests. Raises InvalidRequest."""
    limit = query.get("limit", "100")
    if not limit.isdecimal() or not limit.isascii() or int(limit[:9]) < 1:
        raise InvalidRequest("limit must be a whole number of at least 1", param="limit")
    found = newest_decisions(recent, gateway, min(int(limit[:9]), MAX_DECISIONS))
    hashed = [{"request_id_sha256": _hashed(decision.pop("request")), **decision} for decision in found]
    return msgspec.json.encode({"decisions": hashed})


def _hashed(request_id: object) -> str:
    return hashlib.sha256(str(request_id).encode()).hexdigest()


def _decisions(recent: RecentRequests, gateway: str) -> Iterator[dict[str, object]]:
    for record in recent.newest(RequestFilter()):
        for attempt in reversed(record.attempts):
            if (decision := attempt.decision) is not None:
                yield {
                    "request": record.id,
                    "gateway": gateway,
                    "time": round(attempt.chosen_at, 3),
                    "sent": attempt.is_sent,
                    "error": attempt.error,
                    "policy": decision.policy,
                    **msgspec.structs.asdict(routing_report(decision, attempt.engine_cached_tokens)),
                    "first_token_ms": attempt.first_token_ms,
                }
