"""The body's member `medialane`: medialane's extension of the API. It is removed before vLLM's app gets the body."""

from __future__ import annotations

import msgspec

from medialane.core.errors import InvalidRequest
from medialane.gateway.intake.edits import Buffer
from medialane.gateway.intake.request_body import ABSENT, NULL, UNREADABLE, decode_members
from medialane.gateway.intake.skeleton import Located

_decode_bool = msgspec.json.Decoder(bool).decode


def wants_report(own: msgspec.Raw) -> bool:
    """Return whether the client requests a report. Raises InvalidRequest for unknown keys and invalid values."""
    if own in (ABSENT, NULL):
        return False
    try:
        members = decode_members(own)
    except UNREADABLE as error:
        raise InvalidRequest("medialane must be an object", param="medialane") from error
    for name in members:
        if name != "report":
            raise InvalidRequest("the only supported key of medialane is report", param=f"medialane.{name[:64]}")
    try:
        return "report" in members and _decode_bool(members["report"])
    except msgspec.DecodeError as error:
        raise InvalidRequest("report must be true or false", param="medialane.report") from error


def member_range(body: Buffer, value: Located) -> tuple[int, int]:
    """Return (start, end) of an object's member in the body, including its key and one of the commas around it."""
    start = body.rfind(b'"', 0, body.rfind(b'"', 0, body.rfind(b":", 0, value.start)))
    while body[start - 1 : start].isspace():
        start -= 1
    if body[start - 1 : start] == b",":
        return start - 1, value.end
    end = value.end
    while body[end : end + 1].isspace():
        end += 1
    return start, end + 1 if body[end : end + 1] == b"," else end
