"""A web server of images on the loopback interface, which counts requests."""

import mimetypes
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class PictureServer:
    base_url: str = ""
    num_requests: Counter[str] = field(default_factory=Counter)

    def url(self, name: str) -> str:
        return f"{self.base_url}/{name}"


@asynccontextmanager
async def picture_server(pictures: Mapping[str, bytes], *, cache_control: str = "") -> AsyncIterator[PictureServer]:
    """Serve `pictures` by name; everything else is 404."""
    server = PictureServer()

    async def get(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        server.num_requests[name] += 1
        if name not in pictures:
            raise web.HTTPNotFound
        headers = {"Cache-Control": cache_control} if cache_control else {}
        content_type = mimetypes.guess_type(name)[0] or "image/jpeg"
        return web.Response(body=pictures[name], content_type=content_type, headers=headers)

    app = web.Application()
    app.router.add_get("/{name}", get)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()
