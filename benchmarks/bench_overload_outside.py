"""More load than a server with its defaults can serve, from outside: when refusals come, and what the others wait.

`medialane serve` with one worker of the tiny model and no setting. Its client is a light process of its own
(`open_loop_client`): new images of 150 kB, and texts, for a minute at three times the rates that a closed loop has had
before, whatever becomes of earlier ones. All times are the client's, from the first byte of a request: of a refusal to
the response's first line, of an answer to its first token. `memory` is the gateway's, the most during the load and
after it by the one before it. `batch`: then 200 texts at once, each of which must be answered.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from harness import Bar, Options, Report, percentile
from medialane.testing.sample_media import sample_jpeg
from medialane.testing.tiny_model import build_tiny_model, cache_folder
from servers import Server, medialane_server

ABOUT = "3 times the load that a server with its defaults can serve, from outside: refusals, waits, memory"

LOAD = 3.0
SECONDS, QUICK_SECONDS = 60.0, 10.0
CLOSED_S, CLIENTS = 10.0, 8
NUM_AT_ONCE = 200
#: 150 kB as a JPEG.
_SIZE = (512, 384)
_CLIENT = Path(__file__).with_name("open_loop_client.py")
_POLL_S = 2.0
#: Until idle memory is what it was.
_SETTLE_S = 35.0

MAX_REFUSAL_MS, MAX_MEMORY, MAX_TTFT_S = 100.0, 1.2, 3.0

Row = dict[str, Any]


def run(options: Options) -> Report:
    return uvloop.run(_run(options))


async def _run(options: Options) -> Report:
    model = str(build_tiny_model(cache_folder(os.environ)))
    seconds = QUICK_SECONDS if options.quick else SECONDS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "a.jpg").write_bytes(_jpeg())
        async with medialane_server(model, folder / "serve.log") as server, aiohttp.ClientSession() as session:
            wanted: Row = {"url": server.base_url.removesuffix("/v1"), "model": model, "jpeg": str(folder / "a.jpg")}
            await _client({**wanted, "seconds": CLOSED_S / 2, "clients": CLIENTS})  # warm
            closed = await _client({**wanted, "seconds": CLOSED_S, "clients": CLIENTS})
            rates = {kind: sum(row["kind"] == kind for row in closed) / CLOSED_S for kind in ("image", "text")}
            before = await _memory(session, server)
            sizes = [before]
            polling = asyncio.create_task(_watch_memory(session, server, sizes))
            rows = await _client({**wanted, "seconds": seconds, "rates": {k: LOAD * r for k, r in rates.items()}})
            polling.cancel()
            await asyncio.wait([polling])
            await asyncio.sleep(1.0 if options.quick else _SETTLE_S)
            after = await _memory(session, server)
            batch = await _client({**wanted, "seconds": 0.2, "rates": {"text": NUM_AT_ONCE / 0.2}})
    memory: Row = {"before MB": before / 1e6, "most": max(sizes) / before, "after": after / before}
    load = [_figures(kind, rows, rates, seconds) for kind in rates]
    report = Report("overload_outside", {"load": load, "memory": [memory], "batch": [_batch(batch)]})
    refused = [row["status_s"] for row in rows if row["status"] in (429, 503)]
    served = [row["ttft_s"] for row in rows if "ttft_s" in row]
    num_unanswered = sum(row["status"] != 200 for row in batch)
    report.bars = [
        Bar("refusals, p99 from the first byte, ms", 1000 * _p99(refused), MAX_REFUSAL_MS, "at most"),
        Bar("TTFT p99 of what is served, s", _p99(served), MAX_TTFT_S, "at most"),
        Bar("gateway's memory, most / before", memory["most"], MAX_MEMORY, "at most"),
        Bar("of 200 texts at once, not answered", num_unanswered, 0, "at most"),
    ]
    return report


def _jpeg() -> bytes:
    """Return a JPEG of about 150 kB."""
    return min((sample_jpeg(0, *_SIZE, quality=q) for q in range(85, 100)), key=lambda jpeg: abs(len(jpeg) - 150_000))


async def _client(wanted: Row) -> list[Row]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(_CLIENT), json.dumps(wanted), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return [json.loads(line) for line in output.splitlines()]


async def _watch_memory(session: aiohttp.ClientSession, server: Server, sizes: list[float]) -> None:
    while True:
        sizes.append(await _memory(session, server))
        await asyncio.sleep(_POLL_S)


async def _memory(session: aiohttp.ClientSession, server: Server) -> float:
    async with session.get(f"{server.base_url.removesuffix('/v1')}/metrics") as response:
        lines = (await response.text()).splitlines()
    found = [line for line in lines if line.startswith("medialane_process_memory_bytes{") and 'kind="gateway"' in line]
    return float(found[0].rpartition(" ")[2])


def _figures(kind: str, rows: Sequence[Row], rates: dict[str, float], seconds: float) -> Row:
    rows = [row for row in rows if row["kind"] == kind]
    served = [row["ttft_s"] for row in rows if "ttft_s" in row]
    refused = [row["status_s"] for row in rows if row["status"] in (429, 503)]
    return {
        "kind": kind,
        "closed/s": rates[kind],
        "offered/s": len(rows) / seconds,
        "served/s": len(served) / max([seconds, *(row["ended_s"] for row in rows if "ttft_s" in row)]),
        "ttft p50 s": percentile(served, 0.5) if served else 0.0,
        "ttft p99 s": _p99(served),
        "refused": len(refused),
        "refusal p50 ms": 1000 * percentile(refused, 0.5) if refused else 0.0,
        "refusal p99 ms": 1000 * _p99(refused),
        "other": len(rows) - len(served) - len(refused),
        "most in flight": max(row["num_open"] for row in rows),
    }


def _batch(rows: Sequence[Row]) -> Row:
    statuses = Counter(row["status"] for row in rows)
    return {"sent": len(rows), "answered": statuses[200], "last s": max(row["ended_s"] for row in rows)}


def _p99(values: Sequence[float]) -> float:
    return percentile(values, 0.99) if values else 0.0
