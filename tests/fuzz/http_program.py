"""A gateway, and the name router in front of it, in one process that reports what blocks its event loop.

All of `medialane gateway` with a fake worker and a store, as in tests/hostile, but on asyncio's loop, which can be
measured: the CPU time of each callback, so that other load on the machine does not count. A line of `folder`/blocked is
written for each that takes longer than `BLOCKED_S`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import gateway_program
import uvicorn
from fastapi import FastAPI

from medialane.cli.serving import tune_process
from medialane.config import Config
from medialane.gateway import (
    AccessKeys,
    BoundedServer,
    GatewayConfig,
    NameRouter,
    ServedModel,
    ServedModels,
    http_bounds,
)
from medialane.observability import configure
from medialane.testing.fake_worker import FAKE_CARD
from medialane.wire import RpcConfig, bind_http, bind_unix
from medialane.worker import RpcServer

BLOCKED_S = 0.05
API_KEY = "client"


def measure(file: Path) -> None:
    """Have each callback of the loop timed."""
    run = asyncio.Handle._run  # noqa: SLF001

    def timed(handle: asyncio.Handle) -> None:
        started = time.thread_time()
        run(handle)
        if (taken := time.thread_time() - started) > BLOCKED_S:
            with file.open("a") as lines:
                lines.write(f"{taken:.3f} s in {handle!r}\n")

    asyncio.Handle._run = timed  # type: ignore[method-assign]  # noqa: SLF001


async def serve(config: Config, model: str, folder: Path, *, port: int, flags: Sequence[str]) -> None:
    from medialane.cli import gateway

    tune_process()
    configure(config.logging)
    measure(folder / "blocked")
    store, worker, path = (f"{folder}/{name}" for name in ("store", "worker", "gateway"))
    handler = gateway_program.AgreeingWorker(card=FAKE_CARD)
    workers = RpcServer(handler, RpcConfig())
    await workers.serve(f"unix:{worker}")
    async with gateway_program.mapping(handler, config, f"unix:{store}"):
        with bind_unix(path) as sock:
            addresses = gateway.GatewayAddresses([f"unix:{worker}"], f"unix:{store}")
            routing = asyncio.create_task(route(config.gateway, model, path, port, folder))
            await gateway.serve(gateway_program.reloading(config), model, flags, addresses=addresses, sock=sock)
            routing.cancel()
            await asyncio.wait([routing])
    await workers.close()


async def route(config: GatewayConfig, model: str, path: str, port: int, folder: Path) -> None:
    models = ServedModels([ServedModel("only", (model, "m"), (path,))])
    router = NameRouter(models, AccessKeys.load(config, config.api_keys), config, max_body_bytes=1 << 20)
    settings = uvicorn.Config(router, lifespan="off", log_config=None, access_log=False)
    with bind_http("127.0.0.1", port) as sock:
        try:
            await BoundedServer(settings, bounds=http_bounds(config)).serve([sock])
        finally:
            await models.close()


def note_routes(folder: Path) -> None:
    """Write the routes of the app when it is complete."""
    build = FastAPI.build_middleware_stack

    def noted(app: FastAPI) -> object:
        routes = [[sorted(getattr(route, "methods", None) or ["GET"]), route.path] for route in app.routes]
        (folder / "routes").write_text(json.dumps(routes))
        return build(app)

    FastAPI.build_middleware_stack = noted  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    folder = Path(sys.argv[3])
    note_routes(folder)
    gateway_program.serve = serve
    gateway_program.uvloop.run = asyncio.run
    gateway_program.main(sys.argv[1], int(sys.argv[2]), folder, sys.argv[4:])
