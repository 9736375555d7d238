"""Every endpoint of vLLM's app that accepts media or calls a worker returns our errors with their status, code and
Retry-After, in its API's form, streamed and not."""

import json

import pytest
from app_server import BASE64, DATA_URL, image

from medialane.types.errors import ArenaFull, InvalidImage, PromptRejected, WorkerLost

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
    # Where a stream is broken off, vLLM leaves its pending work to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEXT = {"type": "text", "text": "look"}


def chat(url):
    return {"messages": [{"role": "user", "content": [TEXT, image(url)]}], "max_tokens": 8}


def batch(url):
    return {**chat(url), "messages": [chat(url)["messages"]]}


def responses(url):
    part = {"type": "input_image", "image_url": url, "detail": "auto"}
    return {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 8}


def messages(url):
    data = url.rpartition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}], "max_tokens": 8}


def count(url):
    return {"messages": messages(url)["messages"]}


def tokens(url):
    parts = [{"type": "image_url", "url": url}]
    return {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}, "content_parts": parts}


#: Endpoints whose requests have media. The endpoints in `GENERATE` send them to a worker, too.
MEDIA = {
    CHAT: chat,
    "/v1/chat/completions/batch": batch,
    "/v1/chat/completions/render": chat,
    RESPONSES: responses,
    "/v1/responses/render": responses,
    MESSAGES: messages,
    "/v1/messages/count_tokens": count,
    "/v1/messages/render": messages,
    "/invocations": chat,
    "/tokenize": chat,
    "/inference/v1/generate": tokens,
    "/medialane/publish": chat,
}
#: Endpoints that send their requests to a worker.
GENERATE = {
    CHAT: chat(DATA_URL),
    "/v1/chat/completions/batch": batch(DATA_URL),
    RESPONSES: responses(DATA_URL),
    MESSAGES: messages(DATA_URL),
    "/invocations": chat(DATA_URL),
    "/v1/completions": {"prompt": "A photo", "max_tokens": 8},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}},
    "/generative_scoring": {"query": "is it?", "items": ["a photo"], "label_token_ids": [20, 30]},
}
STREAMED = [CHAT, RESPONSES, MESSAGES, "/invocations", "/v1/completions", "/inference/v1/generate"]
#: Endpoints that do neither. Add endpoints of a new vLLM to one of these tables.
NEITHER = {
    "/v1/systemone",  # 501 for this model
    "/detokenize",
    "/ping",
    "/v1/responses/{response_id}/cancel",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/v1/completions/render",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
    "/inference/v1/abort_requests",
}
ANTHROPIC = (MESSAGES, "/v1/messages/count_tokens")


async def test_every_endpoint_is_in_the_table(server):
    posts = {route.path for route in server.app.routes if "POST" in (getattr(route, "methods", None) or ())}
    assert posts == MEDIA.keys() | GENERATE.keys() | NEITHER


def assert_answer(response, error, path):
    """Check that the response is that error in the endpoint's format."""
    assert response.status_code == error.status, response.text
    assert response.headers.get("retry-after") == (None if error.retry_after_s is None else str(error.retry_after_s))
    document = response.json()
    assert (document["error"]["message"], document["error"]["code"]) == (error.message, error.code)
    named = response.headers["x-request-id"]
    if path in ANTHROPIC:
        assert (document["type"], document["error"]["type"]) == ("error", _anthropic_type(error))
        assert document["request_id"] == named
    else:
        expected = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
        assert document == {"error": {**expected, "request_id": named}}


def _anthropic_type(error):
    return {400: "invalid_request_error", 503: "overloaded_error"}[error.status]


async def post(server, path, body, **options):
    return await server.client.post(path, json={"model": server.model, **body, **options})


@pytest.mark.parametrize("error", [InvalidImage("broken", param="x"), ArenaFull("no room", retry_after_s=7)], ids=str)
@pytest.mark.parametrize("path", MEDIA)
async def test_error_while_preparing_media(server, path, error):
    server.backend.error, server.backend.error_at = error, "prepare"
    assert_answer(await post(server, path, MEDIA[path](DATA_URL)), error, path)


@pytest.mark.parametrize("path", MEDIA)
async def test_invalid_base64(server, path):
    response = await post(server, path, MEDIA[path](f"data:image/png;base64,{BASE64[:-8]}*!*!*!*!"))
    assert response.status_code == 400
    document = response.json()
    assert document["error"]["code"] == "invalid_base64"
    assert document.get("type") == ("error" if path in ANTHROPIC else None)


@pytest.mark.parametrize("path", GENERATE)
async def test_error_while_generating(server, path):
    server.backend.error, server.backend.error_at = WorkerLost("the worker was lost"), "generate"
    assert_answer(await post(server, path, GENERATE[path]), server.backend.error, path)


@pytest.mark.parametrize("path", STREAMED)
async def test_error_before_the_first_token_of_a_stream_has_its_status(server, path):
    server.backend.error, server.backend.error_at = WorkerLost("the worker was lost"), "generate"
    response = await post(server, path, GENERATE[path], stream=True)
    if path == RESPONSES:  # its first event reports creation, before a worker is called
        assert _last_event(response)["code"] == "worker_lost"
    else:
        assert_answer(response, server.backend.error, path)


@pytest.mark.parametrize("path", STREAMED)
async def test_error_in_a_stream_is_an_event_of_its_api(server, path):
    server.backend.error, server.backend.error_at = WorkerLost("the worker was lost"), "stream"
    response = await post(server, path, GENERATE[path], stream=True)
    assert response.status_code == 200
    event = _last_event(response)
    found = event if path == RESPONSES else event["error"]
    assert (found["message"], found["code"]) == ("the worker was lost", "worker_lost")
    if path in (MESSAGES, RESPONSES):
        assert event["type"] == "error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATE)
async def test_without_a_worker_the_response_has_retry_after(server, path, stream):
    if stream and path not in STREAMED:
        pytest.skip("is never streamed")
    server.backend.ready = False
    response = await post(server, path, GENERATE[path], **({"stream": True} if stream else {}))
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json()["error"]["code"] == "no_worker_ready"
    assert response.json().get("type") == ("error" if path in ANTHROPIC else None)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/completions"])
async def test_vllm_rejection_in_a_worker_is_formatted_by_the_app(server, path):
    server.backend.error, server.backend.error_at = PromptRejected("the prompt is too long"), "generate"
    response = await post(server, path, GENERATE[path])
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "BadRequestError"


async def test_error_of_a_medialane_endpoint(server):
    response = await server.client.get("/medialane/decisions")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")


async def test_images_are_published_to_clients_with_the_key(server):
    path, body = "/medialane/publish", chat(DATA_URL)
    response = await server.client.post(path, json=body)
    assert (response.status_code, response.json()) == (200, {"images": []})
    response = await server.client.post(path, json={"messages": []})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert (await server.client.post(path, json=body, headers={"authorization": "no"})).status_code == 401


async def test_medialane_endpoints_are_in_the_openapi_document(server):
    paths = (await server.client.get("/openapi.json")).json()["paths"]
    ours = {route.path for route in server.app.routes if route.path.startswith("/medialane")}
    assert ours <= paths.keys()


def _last_event(response):
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return json.loads(lines[-1].removeprefix("data: "))
