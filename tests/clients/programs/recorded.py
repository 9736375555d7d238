"""Runs a client's calls against one server, and prints what the client got from each as JSON.

Programs of this folder run in processes of their own, some in another environment: they import nothing of ours. The
first argument is `Settings` as JSON. A call's name is that of its function.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_TOKENS = 10
QUESTION = "What is in the picture?"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"type": "string", "enum": ["photo", "drawing"]}, "sharp": {"type": "boolean"}},
    "required": ["kind", "sharp"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
#: A prompt longer than the models' contexts.
TOO_LONG = "word " * 9000
#: Of structured outputs: otherwise models with random weights write white space for ever, where a grammar allows it.
FREQUENCY_PENALTY = 2.0
#: Tokens that take the engine tens of seconds: of answers whose end nobody waits for.
LONG_ANSWER = 7000


@dataclass(frozen=True)
class Settings:
    """The server by its address without /v1; files and URLs of an image, a clip and a document; a URL that answers 404.

    A server that `takes_documents` gets the document, another one its `pages`: the text and a PNG file of each."""

    base_url: str
    model: str
    key: str
    photo: Path
    photo_url: str
    missing_url: str
    clip: Path
    pdf: Path
    pdf_url: str
    pages: list[tuple[str, str]]
    takes_documents: bool = False

    def photo_base64(self) -> str:
        return base64.b64encode(self.photo.read_bytes()).decode()

    def clip_base64(self) -> str:
        return base64.b64encode(self.clip.read_bytes()).decode()

    def pdf_base64(self) -> str:
        return base64.b64encode(self.pdf.read_bytes()).decode()

    def pdf_data_url(self) -> str:
        return f"data:application/pdf;base64,{self.pdf_base64()}"

    def document(self, part: Any, text: Callable[[str], Any], picture: Callable[[bytes], Any], name: str = "") -> list:
        """Return the part of the document, or the parts of its pages, made by `text` and `picture` of a PNG file."""
        if self.takes_documents:
            return [part]
        parts = []
        for number, (words, file) in enumerate(self.pages):
            heading = f"{name}\n" if name and not number else ""
            parts += [text(heading + words), picture(Path(file).read_bytes())]
        return parts

    def data_url(self) -> str:
        return f"data:image/jpeg;base64,{self.photo_base64()}"

    def broken_url(self) -> str:
        """A JPEG whose end is missing."""
        return f"data:image/jpeg;base64,{base64.b64encode(self.photo.read_bytes()[:5000]).decode()}"


def settings() -> Settings:
    fields = json.loads(sys.argv[1])
    return Settings(**{**fields, **{name: Path(fields[name]) for name in ("photo", "clip", "pdf")}})


def png_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def stream(events: Iterable[Any]) -> dict[str, Any]:
    """The events of a stream, which are compared apart from how its text was cut."""
    return {"stream": list(events)}


class Calls:
    """The calls of a program, in the order of their definition. `describe` makes an error comparable."""

    def __init__(self, describe: Callable[[Exception], dict[str, Any]]) -> None:
        self._describe = describe
        self._calls: dict[str, Callable[[], Any]] = {}

    def __call__(self, call: Callable[[], Any]) -> Callable[[], Any]:
        self._calls[call.__name__.replace("_", " ")] = call
        return call

    def print_all(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):  # some clients print
            outcomes = {name: self._outcome(call) for name, call in self._calls.items()}
        json.dump(outcomes, sys.stdout)

    def _outcome(self, call: Callable[[], Any]) -> dict[str, Any]:
        try:
            return {"value": call()}
        except Exception as error:  # noqa: BLE001 - what is raised is what is compared
            return {"error": {"class": type(error).__name__, **self._describe(error)}}
