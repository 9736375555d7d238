"""The routes of vLLM's app: which one serves a request, who may ask for it, and which are not supported."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from functools import lru_cache
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from medialane.vllm_bridge.seams.api_server import AuthenticationMiddleware

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
