"""Which of vLLM's routes a server without an engine answers."""

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from medialane.vllm_bridge.frontend.app import refuse_unsupported

ANSWERED = [
    "/v1/chat/completions/render", "/v1/completions/render", "/v1/responses/render", "/v1/messages/render",
    "/v1/chat/completions/derender", "/v1/completions/derender", "/tokenize", "/detokenize",
]  # fmt: skip
REFUSED = [
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/pooling",
    "/inference/v1/generate", "/v1/audio/transcriptions", "/invocations", "/sleep", "/reset_prefix_cache",
]  # fmt: skip


@pytest.fixture
def client():
    app = FastAPI()

    async def answer() -> str:
        return "answered"

    async def explained(_request, error):
        from starlette.responses import JSONResponse

        return JSONResponse(str(error), 501)

    app.add_exception_handler(NotImplementedError, explained)
    for path in (*ANSWERED, *REFUSED):
        app.add_api_route(path, answer, methods=["POST"])
    for path in ("/health", "/v1/models", "/metrics"):
        app.add_api_route(path, answer, methods=["GET"])
    refuse_unsupported(app, render_only=True)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize("path", ANSWERED)
def test_call_without_engine_is_answered(client, path):
    assert client.post(path).json() == "answered"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
def test_page_is_answered(client, path):
    assert client.get(path).json() == "answered"


@pytest.mark.parametrize("path", REFUSED)
def test_call_that_needs_an_engine_is_refused_by_name(client, path):
    response = client.post(path)
    assert response.status_code == 501
    assert path in response.json()
