"""Whole requests: recordings of a gateway, batch files, bodies of chat completions.

* A *recording* (`--record`) is a batch file whose lines have a member `medialane` (`gateway.recording`).
* *OpenAI batch input*: `custom_id`, `method`, `url`, `body` (https://platform.openai.com/docs/guides/batch; vLLM's
  `entrypoints/launchers/run_batch.py`, whose transcriptions have the file as `file_url`).
* *Bodies*: any JSONL with `messages`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from medialane.compare.formats.line_format import Line, LineFormat, Sources
from medialane.compare.traffic import Ask, UnusableLine
from medialane.gateway.recording import FORMAT, StandIn, parse_stand_in

CHAT = "/v1/chat/completions"
_BARE = "data"


def _is_recorded(line: Line) -> bool:
    return "body" in line and isinstance(line.get("medialane"), dict)


def _is_batch(line: Line) -> bool:
    return "body" in line and "url" in line


def _recorded_at(line: Line) -> float | None:
    at = line["medialane"].get("at") if isinstance(line.get("medialane"), dict) else None
    return float(at) if isinstance(at, int | float) else None


def _recorded(line: Line, sources: Sources) -> Ask:
    if line["medialane"].get("format", FORMAT) != FORMAT:
        raise UnusableLine("it was recorded by another release of medialane, in a format that this one does not know")
    return _batch(line, sources)


def _batch(line: Line, sources: Sources) -> Ask:
    url, body = line.get("url"), line.get("body")
    if not isinstance(url, str) or not isinstance(body, dict):
        raise UnusableLine("url must be a string, and body an object")
    return Ask(urlsplit(url).path, _with_media("", body, sources))


def _body(line: Line, sources: Sources) -> Ask:
    return Ask(CHAT, _with_media("", line, sources))


def _with_media(name: str, value: Any, sources: Sources) -> Any:
    """Return JSON with media of the recorded sizes in place of stand-ins."""
    match value:
        case str():
            return _media(value, sources.stand_ins.bare if name == _BARE else sources.stand_ins.url)
        case dict():
            return {key: _with_media(key, each, sources) for key, each in value.items()}
        case list():
            return [_with_media(name, each, sources) for each in value]
        case _:
            return value


def _media(text: str, made: Callable[[StandIn], str]) -> str:
    try:
        stand_in = parse_stand_in(text)
    except ValueError as error:
        raise UnusableLine(str(error)) from error
    return text if stand_in is None else made(stand_in)


RECORDED = LineFormat(
    "recording",
    _is_recorded,
    _recorded,
    seconds=_recorded_at,
    id_of=lambda line: str(line.get("custom_id", "")),
    note="media that were recorded by their hash are made up: of the same size, and equal where they were equal",
)
BATCH = LineFormat("OpenAI batch", _is_batch, _batch, id_of=lambda line: str(line.get("custom_id", "")))
BODIES = LineFormat("chat bodies", lambda line: isinstance(line.get("messages"), list), _body)
