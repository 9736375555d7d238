"""vLLM's own OpenAI app over our engine client.

Its routes: which one serves a request, who may ask for it, and which are not supported.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from functools import lru_cache
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp
from starlette.websockets import WebSocket
from vllm import envs
from vllm.config import VllmConfig
from vllm.renderers import BaseRenderer

from medialane.prepare.processor import Assembler
from medialane.runtime.tasks import LoopFairness
from medialane.types.errors import MedialaneError
from medialane.types.hashing import digest
from medialane.types.media import MODALITIES
from medialane.vllm_bridge.frontend import client_features, pooling_endpoints, prebuilt, render, renderer_hook
from medialane.vllm_bridge.frontend.engine_client import RoutedEngineClient
from medialane.vllm_bridge.frontend.request_backend import Generation, RequestBackend
from medialane.vllm_bridge.items.mistral_chat import tokenize_without_media
from medialane.vllm_bridge.items.prepared_input import expected_num_tokens
from medialane.vllm_bridge.learned.model_profile import ModelProfile, normalization_of
from medialane.vllm_bridge.seams.api_server import (
    AuthenticationMiddleware,
    count_media_tokens_by,
    init_app_state,
    unload_adapters_by,
    validate_in_thread,
)
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
    """Answer 501, with a message, for those of the app's routes that are not supported, with `render_only` also for
    those that need an engine. They stay in its schema."""
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


async def _refuse_realtime(websocket: WebSocket) -> None:
    """Answer the handshake of vLLM's WebSocket for transcription; without a route it would be 403."""
    message = "transcription in real time is not supported by this gateway: use /v1/audio/transcriptions"
    error = {"message": message, "type": "NotImplementedError", "param": None, "code": 501}
    await websocket.send_denial_response(JSONResponse({"error": error}, 501))


#: Serves a request with JSON, from the parameters of its path and query. Raises MedialaneError.
Action = Callable[[Mapping[str, str]], Awaitable[bytes]]

#: Returns HTTP status and body.
Probe = Callable[[], tuple[int, bytes]]


class Frontend:
    """vLLM's objects in the gateway process: configuration, renderer, and the app built from them."""

    def __init__(self, model: str, vllm_args: Sequence[str], api_keys: Sequence[str] = ()) -> None:
        """Take what was built for this model and these flags before this process was forked. Otherwise it is built:
        that blocks for seconds, so call it before serving. `api_keys` are those of `--api-key`, which is not among the
        flags.

        Raises StartupFailed.
        """
        parts = prebuilt.take(model, vllm_args)
        self.args: Namespace = parts.args
        self.args.api_key = list(api_keys) or self.args.api_key
        self.config: VllmConfig = parts.config
        self.renderer: BaseRenderer = parts.renderer
        #: None for a text-only model.
        self.profile: ModelProfile | None = parts.profile
        self.processor_settings: dict[str, str] = parts.processor_settings
        self.assembler: Assembler = parts.assembler
        self._tasks, self._routes = parts.tasks, parts.routes

    @property
    def model_name(self) -> str:
        """The first of the names by which clients know the model."""
        names = self.args.served_model_name
        return str((names if isinstance(names, str) else names[0]) if names else self.args.model)

    @property
    def is_pooling(self) -> bool:
        """Whether the model is served for pooling: its tasks are those that its workers report."""
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
        actions: Mapping[str, Action] | None = None,
        endpoints: Mapping[str, ASGIApp] | None = None,
        probes: Mapping[str, Probe] | None = None,
        tasks: tuple[str, ...] | None = None,
        render_only: bool = False,
        render_payload: render.Payload = "tensors",
        fairness: LoopFairness | None = None,
    ) -> Any:
        """Build the ASGI app. `outer` wraps everything, including the response to an unhandled exception; `access`
        replaces vLLM's authentication; `inner` runs inside vLLM's own middleware and responds to requests that fail by
        an error recorded in `backend`. `actions` are medialane's, by method and path ("POST /path/{parameter}"), like
        `endpoints`, which respond themselves or raise MedialaneError; `probes` are those of health, by path, of which
        `/health` replaces vLLM's, which assumes one engine; `tasks` are those of the workers, by default what a model
        that generates supports. With `render_only` there are none, and calls that need one are refused. For
        `render_payload` and `fairness` see `render.install`."""
        tokenize_without_media(self.renderer)
        if self.profile is not None:
            renderer_hook.install(self.renderer, backend, self.profile)
        tasks, app = self._app(tasks)
        client = RoutedEngineClient(self.config, self.renderer, backend, tasks)
        validate_in_thread()
        count_media_tokens_by(expected_num_tokens)
        replace_authentication(app, access)
        app.user_middleware.extend(inner)

        async def record_error(_request: Request, error: MedialaneError) -> Response:
            backend.fail(error)
            return Response(status_code=error.status)  # `inner` gives it the form of its API

        app.add_exception_handler(MedialaneError, record_error)
        _add_routes(app, actions or {}, endpoints or {})
        fairness = fairness or LoopFairness()
        if self.profile is not None:
            client_features.serve_files(app, backend, fairness, self._making(self.profile))
        refuse_unsupported(app, render_only=render_only)
        app.add_api_websocket_route("/v1/realtime", _refuse_realtime)
        for path, probe in (probes or {}).items():
            _add_probe(app, path, probe)
        _list_models_while_ready(app, backend)
        app.middleware_stack = outer.cls(app.build_middleware_stack(), *outer.args, **outer.kwargs)
        # With it, a document is scored by the worker that has its query: scores would be lost with that worker.
        self.args.enable_flash_late_interaction = False
        await init_app_state(client, app.state, self.args, tasks)
        unload_adapters_by(app.state, client.adapters.unload)
        if self.is_pooling:
            pooling_endpoints.install(app.state, self.renderer, backend)
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
        if self._routes is not None and self._tasks is not None and tasks in (None, self._tasks):
            return self._tasks, self._routes
        tasks = tasks or self._tasks
        if tasks is None:
            raise ValueError("the tasks of a model for pooling are those of its workers")
        return tasks, prebuilt.routes_of(self.args, self.config, tasks)


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
