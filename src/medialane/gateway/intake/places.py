"""Finds the places of media in a parsed body (conversations, messages, parts), in order."""

from __future__ import annotations

from collections.abc import Iterator

from medialane.gateway.intake.part_kinds import given_places, source_place, uuid_place
from medialane.gateway.intake.place import Place
from medialane.gateway.intake.request_body import ABSENT, Message, Part, RequestBody, parts_with_media, string_or_none


def media_places(body: RequestBody) -> list[Place]:
    """Return the places of media in a body. Raises the exceptions in UNREADABLE."""
    return [*_in_messages("messages", body.messages), *_in_messages("input", body.input)]


def _in_messages(param: str, messages: object) -> Iterator[Place]:
    """Yield the places in a list of messages, or in a list of such lists."""
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, list):
            yield from _in_messages(f"{param}[{i}]", message)
        elif isinstance(message, Message):
            for j, part in parts_with_media(message.content):
                yield from _in_part(f"{param}[{i}].content[{j}]", part)


def _in_part(param: str, part: Part) -> list[Place]:
    """Return the places in a part; an item given only by its uuid counts if there are no others."""
    found = given_places(param, part)
    if part.source is not ABSENT and (source := source_place(param, part)) is not None:
        found.append(source)
    if isinstance(part.content, list) and string_or_none(part.type) == "tool_result":
        for j, inner in parts_with_media(part.content):
            found += _in_part(f"{param}.content[{j}]", inner)
    if not found and part.uuid is not ABSENT and (named := uuid_place(param, part)) is not None:
        found.append(named)
    return found
