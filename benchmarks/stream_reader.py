"""A client of streamed chat completions that notes when each token arrived, and what was delivered in all."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
import msgspec

from link_proxy import request_id


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    code: str | int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None
    error: _Error | None = None


_EVENTS = msgspec.json.Decoder(_Event)
_DURATION = re.compile(r"(\w+);dur=([\d.]+)")
_JSON = {"content-type": "application/json"}


@dataclass(eq=False)
class Stream:
    """One request. `arrivals` are the times of its events with tokens; `error` is the code of an error, or what else
    ended the stream early."""

    number: int
    arrivals: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""
    status: int = 0
    num_prompt_tokens: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0
    #: From the request's header to the response's at the gateway, by its Server-Timing, less the wait in its queue.
    gateway_s: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def answer(self) -> tuple[list[int], str, str | None]:
        """What must be as in an undisturbed run."""
        return self.ids, self.text, self.finish_reason

    async def read(
        self, session: aiohttp.ClientSession, base_url: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Ask and read all; errors end in `error`. `base_url` is that of an OpenAI client."""
        self.began_s = time.perf_counter()
        headers = {**_JSON, "x-request-id": request_id(self.number), **(headers or {})}
        try:
            async with session.post(f"{base_url}/chat/completions", data=body, headers=headers) as response:
                self.status = response.status
                ms = {
                    name: float(value) for name, value in _DURATION.findall(response.headers.get("server-timing", ""))
                }
                self.gateway_s = (ms.get("total", 0.0) - ms.get("admission", 0.0)) / 1000
                if response.status == 200:
                    await self._read_events(response)
                else:
                    self._note(_EVENTS.decode(await response.read()))
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            self.error = type(error).__name__
        self.ended_s = time.perf_counter()
        if not self.error and self.finish_reason is None:
            self.error = "broken off"

    async def _read_events(self, response: aiohttp.ClientResponse) -> None:
        rest = b""
        async for piece in response.content.iter_any():
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data: ")
                if data != b"[DONE]":
                    self._note(_EVENTS.decode(data))

    def _note(self, event: _Event) -> None:
        if event.error is not None:
            self.error = str(event.error.code)
        if event.prompt_token_ids:
            self.num_prompt_tokens = len(event.prompt_token_ids)
        for choice in event.choices:
            if choice.token_ids:
                self.arrivals.append(time.perf_counter())
                self.ids += choice.token_ids
            self.texts.append(choice.delta.content or "")
            self.finish_reason = choice.finish_reason or self.finish_reason
