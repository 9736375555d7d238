"""A light client that is a process of its own: chat completions with new images, and texts, at given rates whatever
becomes of earlier ones, or by some clients that wait for their answers. Writes a line of JSON for each request.

    python open_loop_client.py '{"url": "http://127.0.0.1:8000", "model": "...", "jpeg": "a.jpg", "seconds": 60,
                                 "rates": {"image": 80, "text": 80}, "clients": 0}'

It uses nothing but the standard library, and a connection for each request. Times are seconds from a request's first
byte: `status_s` to the response's first line, `ttft_s` to the first token.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

#: After the last arrival, answers are read for so long.
PATIENCE_S = 60.0
_PIECE_BYTES = 64 << 10
_HEAD = b"\xff\xd8\xff\xfe\x00\x0b%09d"  # SOI, and a comment, so that each image is a new one


class Bodies:
    """Makes bodies. No two images are equal, no two texts."""

    def __init__(self, model: str, jpeg: bytes) -> None:
        self._model = json.dumps(model).encode()
        head = len(_HEAD % 0)
        cut = (3 - head % 3) % 3  # base64 of the head and of the rest are put together
        self._rest_of_head, self._rest = jpeg[2 : 2 + cut], base64.b64encode(jpeg[2 + cut :])
        self._numbers = count(random.randrange(10**8))

    def make(self, kind: str) -> bytes:
        number = next(self._numbers)
        content = b'{"type":"text","text":"Question %d: what is this, and where may it have been?"}' % number
        if kind == "image":
            data = base64.b64encode(_HEAD % number + self._rest_of_head) + self._rest
            content += b',{"type":"image_url","image_url":{"url":"data:image/jpeg;base64,' + data + b'"}}'
        parameters = b'"max_tokens":4,"temperature":0,"ignore_eos":true,"stream":true'
        messages = b'[{"role":"user","content":[' + content + b"]}]"
        return b'{"model":' + self._model + b"," + parameters + b',"messages":' + messages + b"}"


async def ask(host: str, port: int, body: bytes) -> dict[str, Any]:
    """Return the times of one request."""
    found: dict[str, Any] = {"status": 0}
    reader, writer = await asyncio.open_connection(host, port)
    sending = None
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        began = time.perf_counter()
        writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode())
        sending = asyncio.create_task(_send(writer, body))
        line = await reader.readline()
        found |= {"status": int(line.split()[1]), "status_s": time.perf_counter() - began}
        while line := await reader.readline():
            if line.startswith(b"data: {") and b'"content":"' in line and "ttft_s" not in found:
                found["ttft_s"] = time.perf_counter() - began
    except (OSError, IndexError, asyncio.IncompleteReadError) as error:
        found["error"] = type(error).__name__
    finally:
        if sending is not None:
            sending.cancel()
        writer.close()
    return found


async def _send(writer: asyncio.StreamWriter, body: bytes) -> None:
    try:
        for start in range(0, len(body), _PIECE_BYTES):
            writer.write(body[start : start + _PIECE_BYTES])
            await writer.drain()
    except OSError:
        return  # refused meanwhile


async def run(wanted: dict[str, Any], jpeg: bytes) -> None:
    host, port = urlsplit(wanted["url"]).hostname or "", urlsplit(wanted["url"]).port or 80
    bodies = Bodies(wanted["model"], jpeg)
    began, num_open = time.perf_counter(), 0

    async def one(kind: str) -> None:
        nonlocal num_open
        num_open += 1
        at_s = time.perf_counter() - began
        found = await ask(host, port, bodies.make(kind))
        num_open -= 1
        row = {"kind": kind, "at_s": at_s, "ended_s": time.perf_counter() - began, "num_open": num_open, **found}
        sys.stdout.write(json.dumps(row) + "\n")

    async def client(kind: str) -> None:
        while time.perf_counter() - began < wanted["seconds"]:
            await one(kind)

    if wanted.get("clients"):
        await asyncio.gather(*(client(kind) for kind in ("image", "text") for _ in range(wanted["clients"])))
        return
    tasks = []
    for at_s, kind in _arrivals(wanted["rates"], wanted["seconds"]):
        await asyncio.sleep(max(0.0, at_s - (time.perf_counter() - began)))
        tasks.append(asyncio.create_task(one(kind)))
    await asyncio.wait(tasks, timeout=PATIENCE_S)
    for task in tasks:
        task.cancel()


def _arrivals(rates: dict[str, float], seconds: float) -> Iterator[tuple[float, str]]:
    at_s, draw = 0.0, random.Random(1)
    while (at_s := at_s + draw.expovariate(sum(rates.values()))) < seconds:
        yield at_s, draw.choices(list(rates), list(rates.values()))[0]


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    asyncio.run(run(given, Path(given["jpeg"]).read_bytes()))
