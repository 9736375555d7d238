"""A server for `medialane compare`: `python compared_server.py PORT_FILE NUM_ANSWERS`, of which the last requests get
no answer."""

import asyncio
import json
import os
import sys
from itertools import count
from pathlib import Path

from aiohttp import web

NUMBERS = count()


async def models(_request):
    return web.json_response({"data": [{"id": "m"}]})


async def chat(request):
    body = await request.json()
    if "stream" not in body:
        return web.json_response({})
    if next(NUMBERS) >= int(sys.argv[2]):
        await asyncio.Event().wait()
    choice = {"index": 0, "delta": {"content": body["messages"][0]["content"]}}
    events = [json.dumps({"choices": [choice]}), "[DONE]"]
    text = "".join(f"data: {event}\n\n" for event in events)
    return web.Response(text=text, content_type="text/event-stream")


def announce(port):
    """Write the port, whole or not at all."""
    new = Path(sys.argv[1] + ".new")
    new.write_text(str(port))
    os.replace(new, sys.argv[1])


async def main():
    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    announce(runner.addresses[0][1])
    await asyncio.Event().wait()


asyncio.run(main())
