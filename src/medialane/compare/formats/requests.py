"""Whole requests: recordings of a gateway, batch files, bodies of chat completions.

* A *recording* (`--record`) is a batch file whose lines have a member `medialane` (`gateway.recording`).
* *OpenAI batch input*: `custom_id`, `method`, `url`, `body` (https://platform.openai.com/docs/guides/batch; vLLM's
  `entrypoints/launchers/run_batch.py`, whose transcriptions have the file as `file_url`).
* *Bodies*: any JSONL with `messages`.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from medialane.compare.asked import CHAT
from medialane.compare.formats.line_format import Line, LineFormat, Sources
from medialane.compare.stand_ins import StandIns
from medialane.compare.traffic import Ask, UnusableLine
from medialane.gateway.recording import FORMAT, parse_stand_in, with_media


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
    return Ask(urlsplit(url).path, _with_media(body, sources.stand_ins))


def _body(line: Line, sources: Sources) -> Ask:
    return Ask(CHAT, _with_media(line, sources.stand_ins))


def _with_media(body: Any, stand_ins: StandIns) -> Any:
    """Return a body with media of the recorded sizes in place of stand-ins."""

    def made(text: str, is_bare: bool) -> str:
        try:
            stand_in = parse_stand_in(text)
        except ValueError as error:
            raise UnusableLine(str(error)) from error
        if stand_in is None:
            return text
        return stand_ins.bare(stand_in) if is_bare else stand_ins.url(stand_in)

    return with_media(body, made)


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
