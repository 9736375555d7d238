"""vLLM's own OpenAI app over our engine client."""

from __future__ import annotations

import logging
import socket
import sys
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
from medialane.prepare.processor import AssembledPrompt, Assembler, ImageCost
from medialane.vllm_bridge import inline_rendering, renderer_hook
from medialane.vllm_bridge.arguments import create_frontend_config, parse_vllm_args
from medialane.vllm_bridge.assembler import VllmAssembler, supports_split
from medialane.vllm_bridge.engine_client import RoutedEngineClient
from medialane.vllm_bridge.fail_fast import VALIDATION, failing_fast, is_large
from medialane.vllm_bridge.http_server import ServerFactory, check_http, serve_http
from medialane.vllm_bridge.image_tokens import ImageTokens
from medialane.vllm_bridge.media_options import check_model_io
from medialane.vllm_bridge.preparation import VllmProcessor
from medialane.vllm_bridge.request_backend import RequestBackend
from medialane.vllm_bridge.seams.api_server import (
    AuthenticationMiddleware,
    build_app,
    init_app_state,
    middleware_stack_not_built,
    validate_api_server_args,
    validate_in_thread,
)
from medialane.vllm_bridge.settings import settings_of

logger = logging.getLogger(__name__)

TASKS = ("generate",)

#: Serves an operator's GET with JSON, from the query parameters. Raises MedialaneError.
Page = Callable[[Mapping[str, str]], bytes]

#: Serves a POST with JSON, from the scope of the request. Raises MedialaneError.
Action = Callable[[], Awaitable[bytes]]

#: Returns HTTP status and body of `/health`.
Probe = Callable[[], tuple[int, bytes]]


class Frontend:
    """vLLM's objects in the gateway process: configuration, renderer, and the app built from them."""

    def __init__(self, model: str, vllm_args: Sequence[str]) -> None:
        """Load configuration and processors, no weights. Blocks for seconds: call it before serving.

        Raises StartupFailed.
        """
        self.args: Namespace = parse_vllm_args(model, vllm_args)
        check_http(self.args)
        _import_plugins(self.args)
        # It logs a line for each reasoning item of a request, on the event loop: 35 ms for 1500 of them.
        logging.getLogger("vllm.entrypoints.openai.responses.utils").setLevel(logging.ERROR)
        try:
            self.config: VllmConfig = create_frontend_config(self.args)
            self.renderer: BaseRenderer = renderer_from_config(self.config)
        except (OSError, ValueError) as error:
            raise StartupFailed(f"vLLM cannot load the model's configuration or processors: {error}") from error
        self.processor_settings: dict[str, str] = settings_of(self.config.model_config, self.renderer)
        #: One that always raises if `supports_split` is false.
        self.assembler: Assembler = self._assembler() if self.supports_split else _NoAssembler()

    @property
    def takes_media(self) -> bool:
        return bool(self.config.model_config.supports_multimodal_inputs)

    @property
    def supports_split(self) -> bool:
        """Whether items of this model may be processed one by one; otherwise workers must process them."""
        return self.takes_media and supports_split(self.renderer.get_mm_processor())

    @property
    def max_headers(self) -> int:
        """Maximum number of header lines of a request, from vLLM's flags."""
        return int(self.args.h11_max_header_count)

    def has_resize_target(self) -> bool:
        """Return whether JPEGs may be decoded at a fraction of their size for this model (`jpeg_scaled_decode`).
        Processes an image to find out."""
        return self.supports_split and VllmProcessor(self.renderer.get_mm_processor()).has_resize_target()

    def check_media_options(self) -> None:
        """Raise StartupFailed for a decode option of the operator that our decoders do not support."""
        check_model_io(self.config.model_config)

    def _assembler(self) -> Assembler:
        processor = self.renderer.get_mm_processor()
        images = ImageTokens.verified(processor)
        return VllmAssembler(processor, images, max_tokens=self.config.model_config.max_model_len)

    async def app(
        self,
        backend: RequestBackend,
        *,
        outer: Middleware,
        inner: Sequence[Middleware],
        pages: Mapping[str, Page] | None = None,
        actions: Mapping[str, Action] | None = None,
        health: Probe | None = None,
    ) -> Any:
        """Build the ASGI app. `outer` wraps everything, including the response to an unhandled exception; `inner` runs
        inside vLLM's own middleware and responds to requests that fail by an error recorded in `backend`. `pages` and
        `actions` are medialane's, by path; `health` replaces vLLM's `/health`, which assumes one engine."""
        if self.takes_media:
            renderer_hook.install(self.renderer, backend)
        client = RoutedEngineClient(self.config, self.renderer, backend, TASKS)
        with middleware_stack_not_built(), failing_fast():
            app = build_app(self.args, TASKS, self.config.model_config)
        validate_in_thread(is_large, VALIDATION)
        app.user_middleware.extend(inner)

        async def record_error(_request: Request, error: MedialaneError) -> Response:
            backend.fail(error)
            return Response(status_code=error.status)  # `inner` gives it the form of its API

        app.add_exception_handler(MedialaneError, record_error)
        for path, page in (pages or {}).items():
            app.add_api_route(path, _guarded(self.args, _serving(page)), **_described(page))
        for path, action in (actions or {}).items():
            summary = (action.__doc__ or "").partition("\n")[0]
            handler = _guarded(self.args, _doing(action))
            app.add_api_route(path, handler, methods=["POST"], tags=["medialane"], summary=summary)
        if health is not None:
            _add_health(app, health)
        app.middleware_stack = outer.cls(app.build_middleware_stack(), *outer.args, **outer.kwargs)
        await init_app_state(client, app.state, self.args, TASKS)
        if not self.args.trust_request_chat_template:  # a client's template may loop for ever
            inline_rendering.install(self.renderer, backend)
        client.is_serving = True
        return app

    async def serve(
        self,
        app: Any,
        sock: socket.socket,
        stop: Awaitable[object],
        *,
        drain_timeout_s: float,
        server_of: ServerFactory,
    ) -> None:
        """Serve HTTP on `sock` until `stop` is done; requests in flight get `drain_timeout_s` to finish."""
        await serve_http(app, self.args, sock, stop, drain_timeout_s=drain_timeout_s, server_of=server_of)


class _NoAssembler:
    """Used for models whose items are not processed one by one, or without media."""

    accepts_item_options = False
    max_tokens = sys.maxsize

    def assemble(self, token_ids: list[int], features: tuple[Feature, ...], options: bytes) -> AssembledPrompt:
        raise PromptRejected("this model's prompts are not assembled by the gateway")

    def image_cost(self, size: tuple[int, int], options: bytes) -> ImageCost | None:
        return None


Answer = Callable[[Request], Awaitable[bytes]]


def _serving(page: Page) -> Answer:
    async def answer(request: Request) -> bytes:
        return page(request.query_params)

    return answer


def _doing(action: Action) -> Answer:
    async def answer(request: Request) -> bytes:
        return await action()

    return answer


def _guarded(args: Namespace, produce: Answer) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler of JSON which requires the API key if there is one: vLLM's own middleware only guards vLLM's
    paths."""
    tokens = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
    guard = AuthenticationMiddleware(None, tokens) if tokens else None

    async def answer(request: Request) -> Response:
        if guard is not None and not guard.verify_token(request.headers):
            return JSONResponse({"error": "Unauthorized"}, 401)
        return Response(await produce(request), media_type="application/json")

    return answer


def _add_health(app: Any, probe: Probe) -> None:
    """Route GET /health to `probe` ahead of vLLM's route, which stays in the schema and for other methods."""

    async def answer() -> Response:
        status, body = probe()
        return Response(body, status, media_type="application/json" if body else None)

    app.add_api_route("/health", answer, methods=["GET"], include_in_schema=False)
    app.router.routes.insert(0, app.router.routes.pop())


def _described(page: Page) -> dict[str, Any]:
    """Return the page's entry in the app's OpenAPI document."""
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
    """Import parser plugins like vLLM's own server start (`launcher.py:setup_server`). Raises StartupFailed for an
    unknown parser."""
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    try:
        validate_api_server_args(args)
    except KeyError as error:
        raise StartupFailed(f"vLLM flags after `--`: {error.args[0]}") from error
