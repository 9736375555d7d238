"""vLLM's own OpenAI app over our engine client: what it is built from, and its routes.

Theory of operation. What a front end has before it has keys, connections and an event loop follows from model and
flags: configuration, tokenizer, processor and what is found out about it, vLLM's routes with their schemas. A process
that gateways are forked from builds it for them (`build_frontend`), and `take_frontend` hands it over, once, since the
app that is made from it changes renderer and routes. A gateway that is started from scratch builds it when it takes it.
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from functools import lru_cache
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp
from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.reasoning import ReasoningParserManager
from vllm.renderers import BaseRenderer, renderer_from_config
from vllm.tool_parsers import ToolParserManager

from medialane.observability.logging import unchanged_levels
from medialane.prepare.processor import AssembledPrompt, Assembler, ImageCost
from medialane.runtime.tasks import LoopFairness
from medialane.types.errors import InvalidFeature, MedialaneError, PromptRejected, StartupFailed
from medialane.types.feature import Feature, PlaceholderRange
from medialane.types.hashing import digest
from medialane.types.media import MODALITIES, Modality, StageName
from medialane.types.stats import SegmentStats
from medialane.vllm_bridge.engine.plugin import show_vllm_lines
from medialane.vllm_bridge.frontend import client_features, event_template, pooling_endpoints, render, renderer_hook
from medialane.vllm_bridge.frontend.engine_client import RoutedEngineClient
from medialane.vllm_bridge.frontend.http_server import check_http
from medialane.vllm_bridge.frontend.request_backend import Generation, RequestBackend
from medialane.vllm_bridge.frontend.segment_cache import SegmentCache, install_segment_cache, splitter_of
from medialane.vllm_bridge.items.mistral_chat import expand_marks, tokenize_without_media
from medialane.vllm_bridge.items.prepared_input import expected_num_tokens
from medialane.vllm_bridge.learned.model_profile import ModelProfile, normalization_of
from medialane.vllm_bridge.learned.processor_factory import one_thread
from medialane.vllm_bridge.learned.settings import processor_settings
from medialane.vllm_bridge.seams.api_server import (
    AuthenticationMiddleware,
    build_app,
    count_media_tokens_by,
    failing_fast,
    init_app_state,
    middleware_stack_not_built,
    shorten_routes,
    unload_adapters_by,
    validate_api_server_args,
    validate_in_thread,
    without_listening,
)
from medialane.vllm_bridge.seams.arguments import create_frontend_config, parse_vllm_args
from medialane.vllm_bridge.seams.multimodal import processor_of, without_media_warm_up
from medialane.vllm_bridge.seams.vision_chunk import takes_chunks

#: Returns the path, with its parameters, of the route that would serve a request; None if there is none.
RouteOf = Callable[[MutableMapping[str, Any]], str | None]

#: Paths whose routes are remembered. Clients choose paths, of up to 64 KiB.
_MAX_PATHS = 128

_WEIGHTS = "changing or reading the weights of running engines"

#: What needs one engine in the process of the app, by path. vLLM registers some of them only in development mode. Its
#: handlers would answer 500, or without a message, or 200 and fail in the background.
UNSUPPORTED = {
    "/abort_requests": "aborting requests by id (close the connection of a request to abort it)",
    "/inference/v1/abort_requests": "aborting requests by id (close the connection of a request to abort it)",
    "/collective_rpc": "calling methods of the engines' processes by name",
    "/scale_elastic_ep": "changing the number of data-parallel ranks",
    "/fault_tolerance/apply": "fault tolerance of one engine",
    "/fault_tolerance/status": "fault tolerance of one engine",
    **dict.fromkeys(
        (
            "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
            "/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version",
            "/weight_info", "/weight_checker",
        ),
        _WEIGHTS,
    ),
}  # fmt: skip


#: Their routes come first: each of the 60 others is a regular expression, for the router and for vLLM's metrics.
_FREQUENT = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")

#: Ends of the paths of calls that are answered without an engine.
_WITHOUT_ENGINE = ("/render", "/derender", "/tokenize", "/detokenize", "/ping")


def replace_authentication(app: Any, access: Callable[[RouteOf], Middleware]) -> None:
    """Put `access` where vLLM's authentication is, if it has keys: outside of CORS, and inside of the user's."""
    middleware = [each for each in app.user_middleware if each.cls is not AuthenticationMiddleware]
    place = next(number for number, each in enumerate(middleware) if each.cls is CORSMiddleware)
    app.user_middleware = [*middleware[:place], access(_route_of(app)), *middleware[place:]]


def _route_of(app: Any) -> RouteOf:
    """Return a function that finds the route for a request, as Starlette's router does."""

    @lru_cache(_MAX_PATHS)  # 60 regular expressions are as expensive as all other middleware together
    def matching_path(kind: str, method: str, path: str, root_path: str) -> str | None:
        scope = {"type": kind, "method": method, "path": path, "root_path": root_path, "headers": []}
        matching = (route for route in app.router.routes if route.matches(scope)[0] is Match.FULL)
        route: Any = next(matching, None)
        return None if route is None else str(route.path)

    def path_of(scope: MutableMapping[str, Any]) -> str | None:
        return matching_path(scope["type"], scope.get("method", ""), scope["path"], scope.get("root_path", ""))

    return path_of


def refuse_unsupported(app: Any, *, render_only: bool = False) -> None:
    """Answer 501, with a message, for the app's routes that are not supported, with `render_only` also for
    routes that need an engine. They stay in its schema."""
    for route in [route for route in app.routes if isinstance(route, Route)]:
        if route.path in UNSUPPORTED:
            message = f"{UNSUPPORTED[route.path]} is not supported: this gateway has several engines"
        elif render_only and not _needs_no_engine(route):
            message = f"{route.path} needs an engine, and this server has none: it renders (`medialane render`)"
        else:
            continue
        answer = _refusal(message)
        app.router.routes.insert(0, Route(route.path, answer, methods=route.methods, include_in_schema=False))


def _needs_no_engine(route: Route) -> bool:
    is_page = "POST" not in (route.methods or ())
    return is_page or route.path.startswith("/medialane/") or route.path.endswith(_WITHOUT_ENGINE)


def _refusal(message: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_request: Request) -> Response:
        raise NotImplementedError(message)

    return answer


#: Serves a request with JSON, from the parameters of its path and query. Raises MedialaneError.
Action = Callable[[Mapping[str, str]], Awaitable[bytes]]

#: Returns HTTP status and body.
Probe = Callable[[], tuple[int, bytes]]


class Frontend:
    """vLLM's objects in the gateway process: configuration, renderer, and the app built from them. Made by
    `build_frontend`."""

    def __init__(self, model: str, vllm_args: Sequence[str]) -> None:
        """Load configuration and processors, no weights, and build the app's routes: that blocks for seconds. Raises
        StartupFailed."""
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
        without_media_warm_up(self.renderer)
        model_config = self.config.model_config
        #: None for a text-only model.
        self.profile: ModelProfile | None = None
        if model_config.supports_multimodal_inputs:  # not with --language-model-only
            self.profile = ModelProfile(processor_of(self.renderer))
            expand_marks(self.profile.processor)
        self.processor_settings = processor_settings(model_config, self.profile)
        self.assembler = _assembler(model_config, self.profile)
        self._splitter = splitter_of(self.renderer.tokenizer)
        self._segments: SegmentCache | None = None
        #: Without middleware stack and state. None for a model that is served for pooling: its tasks are the ones that
        #: its workers report.
        self.routes: FastAPI | None = None
        self._tasks: tuple[str, ...] = ()
        if self.is_pooling:
            pooling_endpoints.check_supported(self.config)
        else:
            self._tasks = _supported_tasks(model_config)
            self.routes = self._routes_of(self._tasks)

    @property
    def model_name(self) -> str:
        """The first of the names by which clients know the model."""
        names = self.args.served_model_name
        return str((names if isinstance(names, str) else names[0]) if names else self.args.model)

    @property
    def is_pooling(self) -> bool:
        """Whether the model is served for pooling: its workers report its tasks."""
        return bool(self.config.model_config.runner_type == "pooling")

    @property
    def api_keys(self) -> list[str]:
        """The keys of clients, from vLLM's flag or environment variable. Without one, anyone is a client."""
        return [key for key in (self.args.api_key or [envs.VLLM_API_KEY]) if key]

    @property
    def has_priorities(self) -> bool:
        """Whether engines with these flags are scheduled by priority."""
        return bool(self.config.scheduler_config.policy == "priority")

    @property
    def takes_media(self) -> bool:
        return self.profile is not None

    @property
    def segment_stats(self) -> SegmentStats:
        """Of the app's prompts."""
        return SegmentStats() if self._segments is None else self._segments.stats

    @property
    def max_headers(self) -> int:
        """Maximum number of header lines of a request, from vLLM's flags."""
        return int(self.args.h11_max_header_count)

    async def app(
        self,
        backend: RequestBackend,
        *,
        outer: Middleware,
        access: Callable[[RouteOf], Middleware],
        inner: Sequence[Middleware],
        fairness: LoopFairness,
        actions: Mapping[str, Action] | None = None,
        endpoints: Mapping[str, ASGIApp] | None = None,
        probes: Mapping[str, Probe] | None = None,
        tasks: tuple[str, ...] | None = None,
        render_only: bool = False,
        render_payload: render.Payload = "tensors",
        token_cache_bytes: int = 0,
    ) -> Any:
        """Build the ASGI app. `outer` wraps everything, including the response to an unhandled exception; `access`
        replaces vLLM's authentication; `inner` runs inside vLLM's own middleware and responds to requests that fail by
        an error recorded in `backend`. `actions` are medialane's, by method and path ("POST /path/{parameter}"), like
        `endpoints`, which respond themselves or raise MedialaneError; `probes` are health checks, by path, of which
        `/health` replaces vLLM's, which assumes one engine; `tasks` are the workers', by default what a model
        that generates supports. With `render_only` there are none, and calls that need one are refused. For
        `render_payload` and `fairness` see `render.install`. `token_cache_bytes` are for tokens of earlier prompts."""
        tokenize_without_media(self.renderer)
        if self.profile is not None:
            renderer_hook.install(self.renderer, backend, self.profile)
        self._segments = install_segment_cache(self.renderer, backend, self._splitter, token_cache_bytes)
        tasks, app = self._app(tasks)
        client = RoutedEngineClient(self.config, self.renderer, backend, tasks)
        renderer_hook.measure_rendering(self.renderer, backend)
        validate_in_thread()
        count_media_tokens_by(expected_num_tokens)
        replace_authentication(app, access)
        app.user_middleware.extend(inner)

        async def record_error(_request: Request, error: MedialaneError) -> Response:
            backend.fail(error)
            return Response(status_code=error.status)  # `inner` gives it the form of its API

        app.add_exception_handler(MedialaneError, record_error)
        _add_routes(app, actions or {}, endpoints or {})
        if self.profile is not None:
            client_features.serve_files(app, backend, fairness, self._making(self.profile))
        refuse_unsupported(app, render_only=render_only)
        without_listening(app)
        shorten_routes(app, _FREQUENT)
        for path, probe in (probes or {}).items():
            _add_probe(app, path, probe)
        _list_models_while_ready(app, backend)
        app.router.routes.sort(key=lambda route: getattr(route, "path", "") not in _FREQUENT)
        app.middleware_stack = outer.cls(app.build_middleware_stack(), *outer.args, **outer.kwargs)
        # With it, a document is scored by the worker that has its query: scores would be lost with that worker.
        self.args.enable_flash_late_interaction = False
        await init_app_state(client, app.state, self.args, tasks)
        unload_adapters_by(app.state, client.adapters.unload)
        if self.is_pooling:
            pooling_endpoints.install(app.state, self.renderer, backend)
        if "generate" in tasks:
            event_template.install(app.state, backend)
        if "transcription" in tasks:
            renderer_hook.install_speech(app.state, backend)
        if not self.args.trust_request_chat_template:  # a client's template may loop for ever
            renderer_hook.install_inline_rendering(self.renderer, backend)
        if self.args.enable_scale_out or self.args.tokens_only:
            has_chunks = self.profile is not None and takes_chunks(self.profile.processor)
            render.install(app, backend, default=render_payload, fairness=fairness, has_chunks=has_chunks)
            client_features.serve_generate(app.state, backend, self.profile, fairness)
        client.is_serving = True
        return app

    def _making(self, profile: ModelProfile) -> client_features.Making:
        """Return how the values of features are made, for clients."""
        processor = profile.processor
        made_by = {"processor": digest(self.processor_settings)}
        return {modality: {**made_by, **normalization_of(processor, modality)} for modality in MODALITIES}

    def _app(self, tasks: tuple[str, ...] | None) -> tuple[tuple[str, ...], Any]:
        """Return the tasks, and vLLM's app for them."""
        tasks = tasks or self._tasks
        if not tasks:
            raise ValueError("the tasks of a model for pooling are its workers'")
        return tasks, self.routes if tasks == self._tasks else self._routes_of(tasks)

    def _routes_of(self, tasks: tuple[str, ...]) -> FastAPI:
        """Return vLLM's app for these tasks, without middleware stack and state."""
        render.accept_references()
        with middleware_stack_not_built(), failing_fast(), unchanged_levels():
            return build_app(self.args, tasks, self.config.model_config)


#: By model and flags.
_built: dict[tuple[str, tuple[str, ...]], Frontend] = {}


def build_frontend(model: str, vllm_args: Sequence[str]) -> None:
    """Build a front end for the next `take_frontend`. No key of clients is needed, and no thread remains.

    Raises StartupFailed.
    """
    show_vllm_lines()
    with one_thread():
        _built[model, tuple(vllm_args)] = Frontend(model, vllm_args)


def take_frontend(model: str, vllm_args: Sequence[str], api_keys: Sequence[str] = ()) -> Frontend:
    """Return what was built for this model and these flags before this process was forked, or build it: call it before
    serving. The caller owns it. `api_keys` are from `--api-key`, which is not among the flags. Raises
    StartupFailed."""
    key = model, tuple(vllm_args)
    if key not in _built:
        build_frontend(model, vllm_args)
    frontend = _built.pop(key)
    frontend.args.api_key = list(api_keys) or frontend.args.api_key
    return frontend


def _assembler(config: ModelConfig, profile: ModelProfile | None) -> Assembler:
    if profile is None or profile.is_unfit:
        return _NoAssembler({} if profile is None else profile.unfit_stages)
    return profile.assembler(max_tokens=config.max_model_len)


class _NoAssembler:
    """Used for models whose items are not processed one by one, or without media."""

    accepts_item_options = False
    max_tokens = sys.maxsize
    predicted: frozenset[Modality] = frozenset()

    def __init__(self, unfit_stages: Mapping[Modality, StageName]) -> None:
        self.unfit_stages = unfit_stages

    def assemble(self, token_ids: list[int], features: tuple[Feature, ...], options: bytes) -> AssembledPrompt:
        raise PromptRejected("this model's prompts are not assembled by the gateway")

    def place(
        self, token_ids: list[int], features: tuple[Feature, ...], ranges: Sequence[PlaceholderRange]
    ) -> Sequence[PlaceholderRange | None]:
        raise InvalidFeature("features of this model are not supported: send its media")

    def image_cost(self, size: tuple[int, int], options: bytes) -> ImageCost | None:
        return None


def _supported_tasks(config: ModelConfig) -> tuple[str, ...]:
    """Return the tasks of a model that generates, as an engine would that had loaded it.

    Transcription in real time is not among them: its WebSocket bypasses intake.
    """
    if not config.registry.is_transcription_model(config.architectures, config):
        return ("generate",)
    if config.registry.is_transcription_only_model(config.architectures, config):
        return ("transcription",)
    return ("generate", "transcription")


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


def _add_routes(app: Any, actions: Mapping[str, Action], endpoints: Mapping[str, ASGIApp]) -> None:
    for route, action in actions.items():
        method, _, path = route.partition(" ")
        summary = (action.__doc__ or "").partition("\n")[0]
        app.add_api_route(path, _action_handler(action), methods=[method], tags=["medialane"], summary=summary)
    for route, endpoint in endpoints.items():
        method, _, path = route.partition(" ")
        app.router.routes.append(Route(path, endpoint, methods=[method], include_in_schema=False))


def _action_handler(action: Action) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        body = await action({**request.query_params, **request.path_params})
        return Response(body, media_type="application/json")

    return respond


def _add_probe(app: Any, path: str, probe: Probe) -> None:
    """Route GET `path` to `probe`, ahead of a route of vLLM's, which stays in the schema and for other methods."""

    async def answer() -> Response:
        status, body = probe()
        return Response(body, status, media_type="application/json" if body else None)

    app.add_api_route(path, answer, methods=["GET"], include_in_schema=False)
    app.router.routes.insert(0, app.router.routes.pop())


def _list_models_while_ready(app: Any, backend: Generation) -> None:
    """Have GET /v1/models fail like a completion while no worker is ready: clients and load balancers take its answer
    for readiness, which it is with plain vLLM."""
    for route in app.routes:
        if isinstance(route, Route) and route.path == "/v1/models":
            route.app = _while_ready(backend, route.app)


def _while_ready(backend: Generation, app: ASGIApp) -> ASGIApp:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        backend.check_ready()
        await app(scope, receive, send)

    return answer
