"""The frequent routes answer in the short way as FastAPI's whole way does: status, headers and body."""

import json

import httpx
import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.routing import Match
from vllm.entrypoints.anthropic import api_router as messages
from vllm.entrypoints.openai.chat_completion import api_router as chat
from vllm.entrypoints.openai.completion import api_router as completion
from vllm.entrypoints.openai.responses import api_router as responses
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from medialane.vllm_bridge.seams.api_server import shorten_routes, validate_in_thread, without_listening

CHAT = "/v1/chat/completions"
PATHS = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages")
VALID = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
JSON = {"content-type": "application/json"}


class Handler:
    """Answers a chat completion by what its request asks for."""

    async def create_chat_completion(self, request, raw_request):
        if request.model == "refused":
            return ErrorResponse(error=ErrorInfo(message=raw_request.url.path, type="refused", code=409))
        if request.model == "raises":
            raise ValueError(request.messages[0]["content"])
        if request.model == "unforeseen":
            raise RuntimeError("unforeseen")
        return self.events(request)

    async def events(self, request):
        for number in range(2):
            yield f"data: {number} {request.model_dump_json(exclude_unset=True)}\n\n"


def app(*, is_short):
    made = FastAPI()
    for each in (chat, completion, responses, messages):
        made.include_router(each.router)

    async def invalid(_request, error):
        return JSONResponse({"invalid": str(error.errors())}, status_code=422)

    async def raised(_request, error):
        return JSONResponse({"raised": str(error)}, status_code=400)

    made.add_exception_handler(RequestValidationError, invalid)
    made.add_exception_handler(ValueError, raised)
    without_listening(made)
    if is_short:
        shorten_routes(made, PATHS)
    made.state.openai_serving_chat = Handler()
    return made


def client(made):
    return httpx.AsyncClient(transport=httpx.ASGITransport(made, raise_app_exceptions=False), base_url="http://test")


def routes(made):
    return {route.path: route for route in made.routes if route.path in PATHS}


def test_every_frequent_route_is_shortened():
    whole, short = routes(app(is_short=False)), routes(app(is_short=True))
    assert whole.keys() == short.keys() == set(PATHS)
    assert {route.app.__module__ for route in whole.values()} == {"fastapi.routing"}
    assert {route.app.__module__ for route in short.values()} == {shorten_routes.__module__}
    scope = {"type": "http", "method": "POST", "path": CHAT, "root_path": "", "headers": []}
    assert short[CHAT].matches(scope)[0] is Match.FULL


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (VALID, JSON),
        (VALID | {"messages": [{"role": "user", "content": "x" * 4} for _ in range(400)]}, JSON),
        (VALID | {"unknown_field": 1, "stream": True}, JSON),
        (VALID | {"model": "refused"}, JSON),
        (VALID | {"model": "raises"}, JSON),
        (VALID | {"model": "unforeseen"}, JSON),
        (VALID, {"content-type": "application/json; charset=utf-8"}),
        (VALID, {"content-type": "Application/JSON"}),
        (VALID, {"content-type": "text/plain"}),
        (VALID, {}),
        (VALID | {"temperature": "warm"}, JSON),
        (VALID | {"top_logprobs": 3}, JSON),
        ({"model": "m"}, JSON),
        ([], JSON),
        (b"", JSON),
        (b"{", JSON),
        (b"null", JSON),
        (b"\xff\xfe", JSON),
        (b"[" * 5000, JSON),
    ],
    ids=[
        "valid", "large", "unknown field", "refused", "raises", "unforeseen", "with charset", "capitals", "text",
        "no type", "wrong type", "invalid together", "incomplete", "list", "empty", "cut off", "null", "not UTF-8",
        "deeply nested",
    ],
)  # fmt: skip
async def test_answer_is_the_whole_ways(content, headers):
    validate_in_thread()
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    answers = []
    for is_short in (False, True):
        async with client(app(is_short=is_short)) as http:
            response = await http.post(CHAT, content=content, headers=headers)
            answers.append((response.status_code, response.headers, response.content))
    assert answers[1] == answers[0]
