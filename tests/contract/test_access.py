"""Who may ask, over all routes that vLLM's app can have: those of all tasks, of development mode, and medialane's."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import pytest_asyncio
from app_server import KEY, forget_http_metrics, with_keys
from model_hosting_container_standards.common.handler.registry import handler_registry
from prometheus_client import CollectorRegistry
from starlette.middleware import Middleware
from starlette.routing import WebSocketRoute
from vllm.tasks import POOLING_TASKS

from medialane.gateway import AccessKeys, GatewayConfig, ScopeMiddleware
from medialane.gateway.http import RouteKind, kind_of
from medialane.observability import Metrics
from medialane.vllm_bridge.frontend.app import UNSUPPORTED, refuse_unsupported, replace_authentication
from medialane.vllm_bridge.seams.api_server import build_app, middleware_stack_not_built
from vllm_configs import vllm_args

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

API_PAGE = Path(__file__).parents[2] / "docs" / "api.md"
TASKS = ("generate", "transcription", "realtime", *POOLING_TASKS)
FLAGS = [
    "--api-key",
    "first",
    "secret",
    "--enable-scale-out",
    "--enable-tokenizer-info-endpoint",
    "--profiler-config.profiler=torch",
    "--profiler-config.torch_profiler_dir=/tmp",
]
ADMIN, METRICS, WRONG = ({"authorization": f"Bearer {key}"} for key in ("admin", "metrics", "guessed"))
OPEN = {"/health", "/ping", "/version"}
#: All that serves clients. Whatever is not in this list, and not open, needs the admin key if there is one.
CLIENT = {
    "/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc", "/load", "/tokenize", "/detokenize", "/tokenizer_info",
    "/invocations", "/generative_scoring", "/pooling", "/classify", "/score", "/rerank", "/v1/score", "/v1/rerank",
    "/v2/rerank", "/v1/embeddings", "/v2/embed", "/v1/models", "/v1/systemone", "/v1/chat/completions",
    "/v1/chat/completions/batch", "/v1/completions", "/v1/responses", "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel", "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions/render",
    "/v1/completions/render", "/v1/messages/render", "/v1/responses/render", "/v1/chat/completions/derender",
    "/v1/completions/derender", "/inference/v1/generate", "/v1/realtime", "/v1/audio/transcriptions",
    "/v1/audio/translations", "/cohere/v2/chat", "/cohere/v2/chat/render",
}  # fmt: skip


@pytest.fixture(scope="module")
def app():
    """vLLM's whole app, without state: handlers that run fail."""
    with pytest.MonkeyPatch.context() as patch, middleware_stack_not_built():
        for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            patch.setenv(name, "1")
        forget_http_metrics()
        model = SimpleNamespace(
            get_pooling_task=lambda _: "classify", get_score_type=lambda: "cross-encoder", hf_config=SimpleNamespace()
        )
        model.is_cross_encoder = model.is_late_interaction = True
        app = build_app(vllm_args("m", FLAGS), TASKS, model)
        for name in ("register_adapter", "unregister_adapter"):  # later apps of this process would have /adapters, too
            handler_registry.remove_decorator_handler(name)
            handler_registry.remove_handler(name)
    app.state.args.log_error_stack = False
    keys = AccessKeys.load(GatewayConfig(admin_key="admin", metrics_key="metrics"), ["first", "secret"])
    replace_authentication(app, with_keys(keys))
    app.user_middleware.insert(0, Middleware(ScopeMiddleware, metrics=Metrics(CollectorRegistry())))
    refuse_unsupported(app)
    return app


@pytest_asyncio.fixture(loop_scope="session")
async def client(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


def every(app):
    """Each method and path of each route; a mounted app has all methods."""
    for route in app.routes:
        if not isinstance(route, WebSocketRoute):
            yield from itertools.product(getattr(route, "methods", None) or ("GET", "POST", "OPTIONS"), [route.path])


async def statuses(client, routes, headers):
    return {(m, path): (await client.request(m, path, headers=headers)).status_code for m, path in routes}


async def test_every_route_of_vllm_is_known(app):
    """A route that an upgrade of vLLM adds fails here, until somebody has decided whom it is for."""
    paths = {route.path for route in app.routes}
    assert {path for path in paths if kind_of(path) is RouteKind.CLIENT} == CLIENT & paths
    assert {path for path in paths if kind_of(path) is RouteKind.OPEN} == OPEN
    assert {path for path in paths if kind_of(path) is RouteKind.METRICS} == {"/metrics"}
    assert {path for path in paths if kind_of(path) is RouteKind.ADMIN} == UNSUPPORTED.keys() & paths | {
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/adapters/{adapter_name}", "/server_info",
        "/sleep", "/wake_up", "/is_sleeping", "/release_kv_cache_memory", "/pause", "/resume", "/is_paused",
        "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/start_profile", "/stop_profile",
        "/is_scaling_elastic_ep", "/get_world_size", "/kv_event_sources",
    }  # fmt: skip


@pytest.mark.parametrize("headers", [{}, WRONG, {"authorization": "Basic secret"}, {"authorization": "Bearer "}])
async def test_every_route_is_closed_without_a_key_but_those_listed(app, client, headers):
    found = await statuses(client, every(app), headers)
    assert len(found) > 70
    assert {path for (_, path), status in found.items() if status != 401} == OPEN


async def test_api_page_names_every_route(app, server):
    rows = re.findall(r"^\| (`/.+?) \| (?:vLLM|medialane) \|", API_PAGE.read_text(), re.MULTILINE)
    listed = {path for row in rows for path in re.findall(r"`(/[^`]*)`", row)}
    served = {route.path for route in (*app.routes, *server.app.routes)} - {"/unforeseen"}  # of the tests' middleware
    assert served - listed == set()
    assert CLIENT | OPEN | UNSUPPORTED.keys() <= listed


async def test_every_route_of_the_gateways_app_is_closed_without_a_key(server):
    """That of `Frontend.app`, with medialane's own endpoints."""
    transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        found = await statuses(client, every(server.app), {})
    assert {"/medialane/decisions", "/medialane/publish", "/invocations"} <= {path for _, path in found}
    assert {path for (_, path), status in found.items() if status != 401} == OPEN | {"/metrics"}


async def test_api_key_opens_what_is_for_clients(app, client):
    found = await statuses(client, every(app), KEY)
    refused = {path for (_, path), status in found.items() if status in (401, 403)}
    assert refused == {path for _, path in found if kind_of(path) in (RouteKind.ADMIN, RouteKind.METRICS)}
    response = await client.post("/sleep", headers=KEY)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (403, "permission_denied", "permission_error")
    assert "admin key" in error["message"]


async def test_admin_key_opens_everything(app, client):
    found = await statuses(client, every(app), ADMIN)
    assert not [place for place, status in found.items() if status in (401, 403, 404, 405)]


async def test_metrics_key_opens_only_metrics(app, client):
    found = await statuses(client, every(app), METRICS)
    assert {path for (_, path), status in found.items() if status not in (401, 403)} == OPEN | {"/metrics"}


async def test_first_key_of_several_is_accepted(client):
    assert (await client.get("/openapi.json", headers={"authorization": "bearer first"})).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/sleep%0A", "//sleep", "/sleep/", "/./sleep", "/x/../sleep", "/%73leep", "/health/../sleep", "/metrics/../sleep",
     "/metricssleep", "/metrics/health", "/Sleep", "/v1/load_lora_adapter%0A", "/health%0Asleep", "/nowhere", "/"],
)  # fmt: skip
async def test_no_spelling_of_a_path_gets_around_the_key(client, path):
    url = httpx.URL("http://gateway", raw_path=path.encode())
    assert (await client.post(url)).status_code == 401
    assert (await client.post(url, headers=KEY)).status_code in (403, 404, 405, 307)
    assert "paused" not in (await client.post(url, headers=KEY)).text


@pytest.mark.parametrize(("root", "path"), [("/base", "/base/sleep"), ("/base", "/sleep"), ("/sleep", "/sleep/sleep")])
async def test_root_path_gets_nobody_around_the_key(app, path, root):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=root)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        assert (await client.post(path)).status_code == 401
        assert (await client.post(path, headers=KEY)).status_code == 403
        assert (await client.get(f"{root}/health")).status_code != 401


async def test_body_of_401_is_plain_vllms_with_the_requests_id(client):
    response = await client.post("/v1/chat/completions", json={})
    assert response.status_code == 401
    assert response.json() == {"error": "Unauthorized", "request_id": response.headers["x-request-id"]}
    assert response.headers["content-type"] == "application/json"


async def test_preflight_needs_no_key(client):
    asked = {"origin": "http://page", "access-control-request-method": "POST"}
    response = await client.options("/v1/chat/completions", headers=asked)
    assert (response.status_code, "access-control-allow-methods" in response.headers) == (400, True)
    assert (await client.options("/metrics", headers=asked)).status_code == 400
    assert (await client.options("/v1/chat/completions")).status_code == 405
    assert (await client.options("/metrics")).status_code == 401


async def test_websocket_is_refused_before_vllms_route(app):
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": [], "query_string": b""}
    sent = []

    async def send(message):
        sent.append(message)

    await app(scope, None, send)
    assert [(m["type"], m.get("status")) for m in sent] == [
        ("websocket.http.response.start", 501),
        ("websocket.http.response.body", None),
    ]


@pytest.mark.parametrize("path", sorted(UNSUPPORTED))
async def test_endpoint_that_is_not_supported_says_so(app, client, path):
    methods = sorted(m for m, found in every(app) if found == path)
    if not methods:
        pytest.skip("the installed vLLM has no such route with these flags")
    for body in ({}, {"request_ids": ["chatcmpl-1"], "method": "x", "new_data_parallel_size": 2}):
        response = await client.request(methods[0], path, json=body, headers=ADMIN)
        assert (response.status_code, "not supported" in response.json()["error"]["message"]) == (501, True)


@pytest.mark.filterwarnings("ignore:max_tokens is deprecated")
async def test_id_of_a_response_is_in_the_ids_of_its_prompts(server):
    """Those with which vLLM's app calls `generate`, and which the log has."""
    chat = (await server.chat()).json()
    completion = (await server.client.post("/v1/completions", json={"model": server.model, "prompt": "x"})).json()
    response = (await server.client.post("/v1/responses", json={"model": server.model, "input": "x"})).json()
    assert [request.request_id for request in server.backend.requests] == [
        chat["id"],
        completion["id"] + "-0",
        response["id"] + "_0",
    ]
