"""Our `/health` replacing vLLM's, in an app of vLLM's own routers."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.instrumentator.health import router

from medialane.vllm_bridge.frontend.app import _add_probe


@pytest.fixture
def app():
    app = FastAPI()
    app.include_router(router)
    return app


@pytest.mark.parametrize("answer", [(200, b""), (200, b'{"status":"degraded"}'), (503, b'{"status":"unavailable"}')])
def test_health_route_is_replaced_and_keeps_vllms_schema(app, answer):
    schema = FastAPI.openapi(app)
    app.openapi_schema = None
    _add_probe(app, "/health", lambda: answer)
    client = TestClient(app)
    response = client.get("/health")
    assert (response.status_code, response.content) == answer
    assert client.head("/health").status_code == 405
    assert app.openapi() == schema
