"""TLS is implemented by the event loop: its tests run on asyncio's loop and on uvloop."""

import asyncio

import uvloop


def pytest_asyncio_loop_factories(config, item):
    if item.path.name == "test_gateway_http_server.py":
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
