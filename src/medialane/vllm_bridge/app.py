"""vLLM's own OpenAI app over our engine client."""

from __future__ import annotations

import logging
import socket
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm import envs
from vllm.config import VllmConfig
from vllm.reasoning import ReasoningParserManager
from vllm.renderers import BaseRenderer, renderer_from_config
from vllm.tool_parsers import ToolParserManager

from medialane.core.errors import MedialaneError, PromptRejected, StartupFailed
from medialane.core.feature import Feature
from medialane.prepare.processor import AssembledPrompt, Assembler
from medialane.vllm_bridge import renderer_hook
from medialane.vllm_bridge.arguments import create_frontend_config, parse_vllm_args
from medialane.vllm_bridge.assembler import VllmAssembler, supports_split
from medialane.vllm_bridge.engine_client import RoutedEngineClient
from medialane.vllm_bridge.fail_fast import failing_fast
from medialane.vllm_bridge.http_server import check_http, serve_http
from medialane.vllm_bridge.media_options import check_model_io
from medialane.vllm_bridge.preparation import VllmProcessor
from medialane.vllm_bridge.request_backend import RequestBackend
from medialane.vllm_bridge.seams.api_server import (
    AuthenticationMiddleware,
    build_app,
    init_app_state,
    middleware_stack_not_built,
    validate_api_server_args,
)
from medialane.vllm_bridge.settings import processor_settings

logger = logging.getLogger(__name__)

TASKS = ("generate",)

#: Answers a GET of an operator with JSON, from the query's parameters. Raises MedialaneError.
Page = Callable[[Mapping[str, str]], bytes]

#: How the server is: the HTTP status and the body that `/health` answers.
Probe = Callable[[], tuple[int, bytes]]


class Frontend:
    """Everything of vLLM that the gateway's process holds: configuration, renderer, and the app made of them."""

    def __init__(self, model: str, vllm_args: Sequence[str]) -> None:
        """Load configuration and processors; no weights. Takes seconds and blocks: call it before serving.

        Raises StartupFailed.
        """
        self.args: Namespace = parse_vllm_args(model, vllm_args)
        check_http(self.args)
        _import_plugins(self.args)
        try:
            self.config: VllmConfig = create_frontend_config(self.args)
            self.renderer: BaseRenderer = renderer_from_config(self.config)
        except (OSError, ValueError) as error:
            raise StartupFailed(f"vLLM cannot load the model's configuration or processors: {error}") from error
        self.processor_settings: dict[str, str] = processor_settings(self.config.model_config, self.renderer)

    @property
    def takes_media(self) -> bool:
        return bool(self.config.model_config.supports_multimodal_inputs)

    @property
    def supports_split(self) -> bool:
        """Whether items of this model may be processed one by one; else workers must do it."""
        return self.takes_media and supports_split(self.renderer.get_mm_processor())

    @property
    def max_headers(self) -> int:
        """Header lines of a request, from vLLM's flags."""
        return int(self.args.h11_max_header_count)

    def has_resize_target(self) -> bool:
        """Whether JPEGs may be decoded at a fraction of their size for this model (`jpeg_scaled_decode`). Processes an
        image to find out."""
        return self.supports_split and VllmProcessor(self.renderer.get_mm_processor()).has_resize_target()

    def check_media_options(self) -> None:
        """Raise StartupFailed for a decode option of the operator that our decoders do not honour."""
        check_model_io(self.config.model_config)

    def assembler(self) -> Assembler:
        """What expands prompts; one that refuses to, where `supports_split` is false."""
        return VllmAssembler(self.renderer.get_mm_processor()) if self.supports_split else _NoAssembler()

    async def app(
        self,
        backend: RequestBackend,
        *,
        outer: Middleware,
        inner: Sequence[Middleware],
        pages: Mapping[str, Page] | None = None,
        health: Probe | None = None,
    ) -> Any:
        """The ASGI app. `outer` stands around everything, even the answer to an unforeseen exception; `inner` behind
        vLLM's own middleware: it answers requests that fail by an error that `request_backend` remembers. `pages` are
        ours, by path; `health` answers in place of vLLM's `/health`, which knows one engine."""
        if self.takes_media:
            renderer_hook.install(self.renderer, backend)
        client = RoutedEngineClient(self.config, self.renderer, backend, TASKS)
        with middleware_stack_not_built(), failing_fast():
            app = build_app(self.args, TASKS, self.config.model_config)
        app.user_middleware.extend(inner)

        async def answer_ours(_request: Request, error: MedialaneError) -> Response:
            backend.fail(error)
            return Response(status_code=error.status)  # `inner` gives it the form of its API

        app.add_exception_handler(MedialaneError, answer_ours)
        for path, page in (pages or {}).items():
            app.add_api_route(path, _guarded(self.args, page), **_described(page))
        if health is not None:
            _answer_health(app, health)
        app.middleware_stack = outer.cls(app.build_middleware_stack(), *outer.args, **outer.kwargs)
        await init_app_state(client, app.state, self.args, TASKS)
        client.is_serving = True
        return app

    async def serve(
        self, app: Any, sock: socket.socket, stop: Awaitable[object], drain_timeout_s: float, *, http: Any
    ) -> None:
        """Serve HTTP on `sock` until `stop` is done; running requests get `drain_timeout_s` to finish. `http` is
        uvicorn's setting of that name."""
        await serve_http(app, self.args, sock, stop, drain_timeout_s=drain_timeout_s, http=http)


class _NoAssembler:
    """Stands where no prompt is ever assembled: stages `decoded` and `url`, or a model without media."""

    accepts_item_options = False

    def assemble(self, token_ids: list[int], features: tuple[Feature, ...], options: bytes) -> AssembledPrompt:
        raise PromptRejected("this model's prompts are not assembled by the gateway")


def _guarded(args: Namespace, page: Page) -> Callable[[Request], Awaitable[Response]]:
    """A page for who has the API key, where there is one: vLLM's own middleware guards vLLM's own paths alone."""
    tokens = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
    guard = AuthenticationMiddleware(None, tokens) if tokens else None

    async def answer(request: Request) -> Response:
        if guard is not None and not guard.verify_token(request.headers):
            return JSONResponse({"error": "Unauthorized"}, 401)
        return Response(page(request.query_params), media_type="application/json")

    return answer


def _answer_health(app: Any, probe: Probe) -> None:
    """Put our `/health` before vLLM's, of which the schema and what else it answers to stay."""

    async def answer() -> Response:
        status, body = probe()
        return Response(body, status, media_type="application/json" if body else None)

    app.add_api_route("/health", answer, methods=["GET"], include_in_schema=False)
    app.router.routes.insert(0, app.router.routes.pop())


def _described(page: Page) -> dict[str, Any]:
    """A page in the app's OpenAPI document."""
    return {
        "methods": ["GET"],
        "summary": (page.__doc__ or "").partition("\n")[0],
        "tags": ["medialane"],
        "response_class": JSONResponse,
        "responses": {400: {"description": "A parameter is wrong"}, 401: {"description": "The API key is missing"}},
        "openapi_extra": {
            "parameters": [
                {
                    "name": "limit",
                    "in": "query",
                    "required": False,
                    "schema": {"type": "integer", "minimum": 1, "default": 100},
                }
            ]
        },
    }


def _import_plugins(args: Namespace) -> None:
    """As vLLM's own server start (`launcher.py:setup_server`). Raises StartupFailed for a parser that nobody knows."""
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    try:
        validate_api_server_args(args)
    except KeyError as error:
        raise StartupFailed(f"vLLM flags after `--`: {error.args[0]}") from error
