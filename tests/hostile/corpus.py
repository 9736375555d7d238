"""A row of the corpus: a request and the limits of its effect on the gateway."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gateway_process import CHAT
from origin import MediaHosts


@dataclass(frozen=True)
class World:
    """What a row's request may name."""

    hosts: MediaHosts
    folder: Path
    """Below it `allowed` is the folder that file: URLs may name."""
    model: str

    def expand(self, url: str) -> str:
        """`{canary}`, `{origin}`, `{tls}`, `{closed}` are ports; `{host}` is the origin with its port; `{folder}`."""
        names = {
            "canary": self.hosts.canary_port,
            "origin": self.hosts.port,
            "tls": self.hosts.tls_port,
            "closed": self.hosts.closed_port,
            "host": f"127.0.0.2:{self.hosts.port}",
            "folder": self.folder,
        }
        for name, value in names.items():
            url = url.replace("{" + name + "}", str(value))
        return url


Body = Callable[[World], bytes]


@dataclass(frozen=True)
class Row:
    """`name` begins with the row's number in the table of facts, or with + where it is not in there.

    `code` is the status where vLLM itself answers. `seconds`, on an idle machine, and `mib` bound the answer's time and
    the growth of the gateway's and the preparers' resident memory.
    """

    name: str
    body: Body
    status: int
    code: str | int | None = None
    seconds: float = 3.0
    mib: float = 64.0
    path: str = CHAT


def chat(model: str, *parts: dict[str, object]) -> bytes:
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}
    return json.dumps({"model": model, "max_tokens": 3, "messages": [message]}).encode()


def media_part(url: str, kind: str = "image_url") -> dict[str, object]:
    return {"type": kind, kind: {"url": url}}


def data_url(data: bytes, media_type: str = "image/jpeg") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def at(url: str, kind: str = "image_url") -> Body:
    """A request with media of this URL, with placeholders expanded."""
    return lambda world: chat(world.model, media_part(world.expand(url), kind))


def sent(make: Callable[[], bytes], kind: str = "image_url", media_type: str = "image/jpeg") -> Body:
    """A request with these bytes inside it."""
    return lambda world: chat(world.model, media_part(data_url(make(), media_type), kind))
