"""The line of a request in the log (`--access-log`), written once, when it has ended, whatever ended it. It is made of
the request's record, so it has no prompt, no media, no salt, and of a URL the host."""

from __future__ import annotations

import logging

from medialane.gateway.requests import RequestRecord, RequestView
from medialane.observability.logging import ACCESS_LOGGER

logger = logging.getLogger(ACCESS_LOGGER)

#: Asked for by machines, every few seconds.
_PROBES = frozenset({"/health", "/ping", "/metrics"})
#: Of a path that no route has.
_MAX_PATH_CHARACTERS = 100

_OMITTED: tuple[object, ...] = (None, "", {}, [])


def log_end(method: str, path: str, record: RequestRecord) -> None:
    """Write the line of a request that has ended. `path` is the client's; that of its route is preferred."""
    view = record.view()
    if view.path in _PROBES:
        return
    route = view.path or ascii(path)[1 : _MAX_PATH_CHARACTERS + 1].rstrip("'")
    fields = {"method": method, "path": route, **_fields(view)}
    fields = {name: value for name, value in fields.items() if value not in _OMITTED}
    message = f"{method} {route} {view.status}"
    logger.info("%s", _Text(message, fields), extra={"fields": {"msg": message, **fields}})


def _fields(view: RequestView) -> dict[str, object]:
    error = view.error
    return {
        "status": view.status,
        "error": None if error is None else error.code,
        "reason": None if error is None else error.reason,
        "model": view.model,
        "tenant": view.tenant,
        "stream": view.streams,
        "worker": view.worker,
        "attempts": len(view.attempts) or None,
        "num_items": view.num_items or None,
        "items": [
            {
                "modality": item.modality,
                "outcome": item.outcome,
                "embedding": item.embedding,
                "source": item.source,
                "bytes": item.bytes,
                "tokens": item.tokens,
            }
            for item in view.items
        ],
        "prompt_tokens": view.prompt_tokens,
        "cached_tokens": view.cached_tokens,
        "generated_tokens": view.generated_tokens or None,
        "total_ms": view.total_ms,
        "ttft_ms": view.ttft_ms,
        "stages_ms": view.stages_ms,
    }


class _Text:
    """The message with the fields that it does not have, if the log is text."""

    def __init__(self, message: str, fields: dict[str, object]) -> None:
        self._message = message
        self._fields = fields

    def __str__(self) -> str:
        others = ((name, value) for name, value in self._fields.items() if name not in ("method", "path", "status"))
        return " ".join([self._message, *(f"{name}={_word(value)}" for name, value in others)])


def _word(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case str():
            return ascii(value) if set(value) & set(" \"'=") or not value.isprintable() else value
        case dict():
            return ",".join(f"{name}:{ms}" for name, ms in value.items())
        case list():
            return ",".join(f"{each['modality']}:{each['outcome'] or 'none'}" for each in value)
        case _:
            return str(value)
