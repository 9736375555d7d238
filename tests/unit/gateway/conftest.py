"""TLS and the end of connections are the event loop's: their tests run on asyncio's loop and on uvloop."""

import asyncio

import uvloop


def pytest_asyncio_loop_factories(config, item):
    if item.path.name in ("test_gateway_http_server.py", "test_gateway_refused_bodies.py"):
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
