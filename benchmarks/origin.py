"""A web server in a separate process, for benchmarks that fetch. It imports little, so that it starts quickly."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import NamedTuple

import uvloop
from aiohttp import web

_START_S = 60.0


class File(NamedTuple):
    content: bytes
    media_type: str
    headers: Mapping[str, str] = {}


@contextlib.contextmanager
def origin(files: Mapping[str, File]) -> Iterator[str]:
    """Serve `files` at /<name>/<anything>; yields the URL of the server."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_origin, args=(theirs, dict(files)), daemon=True)
    process.start()
    try:
        if not ours.poll(_START_S):
            raise RuntimeError(f"the web server was not ready after {_START_S:g} s")
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join(10)


def run_origin(pipe: Connection, files: dict[str, File]) -> None:
    """Main function of the web server process."""
    uvloop.run(_serve(pipe, files))


async def _serve(pipe: Connection, files: dict[str, File]) -> None:
    async def get(request: web.Request) -> web.Response:
        file = files[request.match_info["name"]]
        return web.Response(body=file.content, content_type=file.media_type, headers=file.headers)

    app = web.Application()
    app.router.add_get("/{name}/{anything}", get)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pipe.send(runner.addresses[0][1])
    await asyncio.Event().wait()
