"""A request as it is sent to be compared: to the served model, streamed where it can be, and greedy."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec
from pybase64 import b64decode

from medialane.compare.traffic import Ask

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
#: Endpoints with choices, of which vLLM returns token ids.
_WITH_CHOICES: Final = frozenset((CHAT, COMPLETIONS))
_SAMPLED: Final = frozenset((CHAT, COMPLETIONS, RESPONSES, MESSAGES))
_FILE: Final = "file_url"
#: Members that sampling needs, and that a greedy request may not have, or not with any value.
_OF_SAMPLING: Final = frozenset(("top_p", "top_k", "min_p", "seed", "best_of"))


@dataclass(frozen=True)
class Asking:
    """How requests are sent: `model` is the name of the served one. `as_sent`: sampled and streamed as they are, so
    that answers need not be equal. `has_token_ids`: the server returns token ids if it is asked for them."""

    model: str
    as_sent: bool = False
    has_token_ids: bool = True

    def body(self, ask: Ask) -> dict[str, Any]:
        body = {**ask.body, "model": self.model}
        body.pop("medialane", None)
        if ask.path not in _SAMPLED or self.as_sent:
            return body
        body = {name: value for name, value in body.items() if name not in _OF_SAMPLING}
        body |= {"temperature": 0, "stream": True}
        if body.get("n", 1) != 1:
            body["n"] = 1
        if ask.path in _WITH_CHOICES:
            body["stream_options"] = {"include_usage": True}
            if self.has_token_ids:
                body["return_token_ids"] = True
        return body

    def content(self, ask: Ask) -> dict[str, Any]:
        """Return the arguments of aiohttp's request. May take long for large media: not for the event loop."""
        body = self.body(ask)
        if _FILE in body:
            return {"data": _form(body)}
        return {"data": msgspec.json.encode(body), "headers": {"Content-Type": "application/json"}}


def _form(body: Mapping[str, Any]) -> aiohttp.FormData:
    form = aiohttp.FormData()
    for name, value in body.items():
        if name == _FILE:
            data = b64decode(str(value).partition(",")[2])
            form.add_field("file", io.BytesIO(data), filename="audio", content_type="application/octet-stream")
            continue
        for each in value if isinstance(value, list) else [value]:
            form.add_field(name, each if isinstance(each, str) else msgspec.json.encode(each).decode())
    return form
