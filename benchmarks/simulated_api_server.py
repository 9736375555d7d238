"""vLLM's own API server over a simulated engine, in one process: `python simulated_api_server.py MODEL [vLLM flags]`.

vLLM's server functions build and serve the app, without medialane's middleware, router or RPC. `RoutedEngineClient` is
the engine client: it converts each request and each output once, as vLLM's own client does.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import AsyncGenerator

import uvloop
from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.renderers import renderer_from_config

from medialane.testing.simulated import SimulatedConfig, SimulatedEngine
from medialane.types.admin import AdminCall, AdminResult
from medialane.types.errors import MedialaneError
from medialane.types.feature import PreparedPrompt
from medialane.types.request import Continuable, EngineRequest, OutputDelta
from medialane.vllm_bridge.frontend import RoutedEngineClient
from medialane.vllm_bridge.seams.arguments import (
    FlexibleArgumentParser,
    create_frontend_config,
    make_arg_parser,
    validate_parsed_serve_args,
)


class InProcessEngine:
    """`Generation` by one engine in this process."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine

    def check_ready(self) -> None:
        """It is, always."""

    def generate(
        self, request: EngineRequest, prepared: PreparedPrompt | None, continuable: Continuable | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        return self._engine.generate(request, ())

    def fail(self, error: MedialaneError) -> None:
        """vLLM's app responds from the exception itself."""

    def has_next(self) -> bool:
        return False

    async def administer(self, call: AdminCall) -> list[AdminResult]:
        return [await self._engine.administer(call)]


async def _serve(args: Namespace) -> None:
    address, sock = setup_server(args, reuse_port=False)
    config = create_frontend_config(args)
    backend = InProcessEngine(SimulatedEngine(SimulatedConfig(), model=args.model))
    client = RoutedEngineClient(config, renderer_from_config(config), backend, ("generate",))
    with sock:
        await (await build_and_serve(client, address, sock, args))


def main() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--model", *sys.argv[1:]])
    validate_parsed_serve_args(args)
    uvloop.run(_serve(args))


if __name__ == "__main__":
    main()
