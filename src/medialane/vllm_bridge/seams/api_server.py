"""vLLM's OpenAI app and HTTP server, with its endpoints of speech and pooling.

*Validation of requests stops at the first invalid element of a list or dict.* vLLM's app validates bodies on the event
loop, and pydantic records an error for every invalid element, times every branch of its union: two thousand `{}` in the
`input` of `/v1/responses` took seconds. Acceptance is unchanged, since one invalid element suffices to reject a list;
vLLM's response lists at most ten errors anyway. A valid item of `input` takes 50 us as well, for the thirty branches of
its union, so a large body is validated in a thread. pydantic holds the GIL, but a Python function called before each
element lets the event loop run in between. Adapters are patched at their construction in `build_app`: FastAPI makes one
for each body, `/invocations` its own.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from fastapi import FastAPI
from fastapi.dependencies import utils
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from pydantic_core import SchemaValidator
from starlette.datastructures import State
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher
from vllm.entrypoints.openai.chat_completion import serving
from vllm.entrypoints.pooling.base.io_processor import PoolingIOProcessor
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.entrypoints.serve.utils.api_utils import validate_json_request, with_cancellation
from vllm.logger import configure_logging_from_args
from vllm.plugins.io_processors import has_io_processor
from vllm.renderers import BaseRenderer


@contextmanager
def middleware_stack_not_built() -> Iterator[None]:
    """Suppress the build of the middleware stack within this context.

    vLLM's SageMaker bootstrap builds the stack before our middleware is added. A second build would instantiate every
    middleware twice: the user's, and the one that counts requests, whose second instance counts nothing because the
    metrics of the first are already registered.
    """
    build = FastAPI.build_middleware_stack
    FastAPI.build_middleware_stack = lambda _app: None  # type: ignore[assignment, method-assign, return-value]
    try:
        yield
    finally:
        FastAPI.build_middleware_stack = build  # type: ignore[method-assign]


def count_media_tokens_by(expected: Callable[[Any], dict[str, int] | None]) -> None:
    """Make chat completions report `expected(engine_input)` as the tokens of media by modality, unless it is None. The
    dict is read at the end of the request; vLLM's own function counts before it begins."""
    count = getattr(serving._get_mm_token_counts, "__wrapped__", serving._get_mm_token_counts)

    def counted(engine_input: Any) -> Any:
        num_tokens = expected(engine_input)
        return count(engine_input) if num_tokens is None else num_tokens

    counted.__wrapped__ = count  # type: ignore[attr-defined]
    serving._get_mm_token_counts = counted


#: Of the functions that vLLM's decorator makes of handlers.
_LISTENING = with_cancellation(lambda: None).__code__


def without_listening(app: FastAPI) -> None:
    """Have no handler of `app` listen for the client's disconnect, which takes two tasks a request: whoever calls the
    app cancels it."""
    for route in (route for route in app.routes if isinstance(route, APIRoute)):
        handler: Any = route.dependant.call
        if getattr(handler, "__code__", None) is _LISTENING:
            route.dependant.call = handler.__wrapped__


#: A handler's parameters, of a route whose body is JSON of one model.
_PARAMETERS = ("request", "raw_request")


def shorten_routes(app: FastAPI, paths: Collection[str]) -> None:
    """Have the routes of these paths skip FastAPI's parameters, contexts and kinds of bodies, which cost each request
    CPU time and of which they use none. A body that is not valid takes FastAPI's own way, for its error."""
    for route in (route for route in app.routes if isinstance(route, APIRoute) and route.path in paths):
        of, checks = route.dependant, [each.call for each in route.dependant.dependencies]
        is_plain = not (of.path_params or of.query_params or of.header_params or of.cookie_params)
        names = (*(field.name for field in of.body_params), of.request_param_name)
        if is_plain and names == _PARAMETERS and checks == [validate_json_request] and not route._embed_body_fields:
            route.app = _short(route.app, of.body_params, of.call)


def _short(whole: ASGIApp, fields: list[Any], handler: Any) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        body = await request.body()
        values: dict[str, Any] = {}
        if request.headers.get("content-type") == "application/json":
            with suppress(Exception):  # raised again on the whole way
                values, errors = await utils.request_body_to_args(fields, json.loads(body), embed_body_fields=False)
                values = {} if errors else values
        if values:
            response = await handler(**values, raw_request=request)
            await response(scope, receive, send)
        else:
            await whole(scope, _again(body, receive), send)

    return answer


def _again(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


# The validation of requests

#: pydantic schemas that have the setting `fail_fast`.
_COLLECTIONS = ("list", "dict", "set", "frozenset", "tuple", "deque")

#: Elements that take less time than a call of a Python function.
_ATOM = {"type": "any"}
_ATOMS = ("any", "int", "float", "str", "bool", "literal")

#: Called before each element of a list: entering a Python function, a thread yields the GIL to a waiting one.
_RELEASE_GIL = {"type": "no-info", "function": lambda element: element}

#: Members of a schema that are values, not schemas.
_VALUES = ("default", "expected", "metadata", "members", "serialization")

#: One thread: several would compete with the event loop for the GIL.
_VALIDATION = ThreadPoolExecutor(max_workers=1, thread_name_prefix="validation")

#: A body of fewer values is validated on the event loop, in at most 3 ms.
_LARGE_NUM_VALUES = 200

#: Validates one of FastAPI's bodies: fields, the parsed body, whether fields are embedded.
_Validate = Callable[[Any, Any, bool], Coroutine[Any, Any, Any]]


def validate_in_thread() -> None:
    """Make FastAPI validate large parsed JSON bodies in a thread from now on, instead of on the event loop."""
    validate: _Validate = getattr(utils.request_body_to_args, "__wrapped__", utils.request_body_to_args)

    def validated(fields: Any, body: Any, embed: bool) -> Any:
        try:
            validate(fields, body, embed).send(None)
        except StopIteration as ended:
            return ended.value
        raise RuntimeError("FastAPI awaited something while it validated a JSON body")

    def in_thread(body_fields: Any, received_body: Any, embed_body_fields: bool) -> Awaitable[Any]:
        if not is_large(received_body):
            return validate(body_fields, received_body, embed_body_fields)
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(_VALIDATION, validated, body_fields, received_body, embed_body_fields)

    in_thread.__wrapped__ = validate  # type: ignore[attr-defined]
    utils.request_body_to_args = in_thread  # type: ignore[assignment]


def is_large(body: object) -> bool:
    """Return whether a parsed JSON body is validated in the thread."""
    if not isinstance(body, dict):
        return False
    values: list[object] = [body]
    for value in values:
        if isinstance(value, dict | list):
            if len(values) + len(value) > _LARGE_NUM_VALUES:
                return True
            values += value.values() if isinstance(value, dict) else value
    return False


@contextmanager
def failing_fast() -> Iterator[None]:
    """Make every TypeAdapter constructed within this context fail fast, unless it has its own configuration."""
    make = TypeAdapter.__init__

    def make_fast(
        adapter: TypeAdapter[Any], of: Any, *, config: Any = None, _parent_depth: int = 2, **more: Any
    ) -> None:
        make(adapter, of, config=config, _parent_depth=_parent_depth + 1, **more)
        if config is None and adapter.pydantic_complete:
            # Not with the model's prebuilt validator, which lists every error.
            adapter.validator = SchemaValidator(_fast(adapter.core_schema), _use_prebuilt=False)

    TypeAdapter.__init__ = make_fast  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        TypeAdapter.__init__ = make  # type: ignore[method-assign]


def _fast(schema: Any) -> Any:
    """Return a fail-fast copy; schemas are shared with their models."""
    if isinstance(schema, list | tuple):
        return type(schema)(_fast(part) for part in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    is_schema = isinstance(kind, str)  # otherwise a dict of schemas by name, which may be `type` or `default`
    copy = {name: part if is_schema and name in _VALUES else _fast(part) for name, part in schema.items()}
    if kind == "list" and copy.get("items_schema", _ATOM)["type"] not in _ATOMS:
        copy["items_schema"] = {"type": "function-before", "function": _RELEASE_GIL, "schema": copy["items_schema"]}
    return copy | {"fail_fast": True} if kind in _COLLECTIONS else copy


def unload_adapters_by(state: Any, unload: Callable[[str], Awaitable[None]]) -> None:
    """Have the app of this state, which only forgets the adapter that it is to unload, await `unload(name)`, too. If
    that raises, the adapter is still loaded."""
    models = state.openai_serving_models
    forget = models.unload_lora_adapter

    async def unload_everywhere(request: UnloadLoRAAdapterRequest) -> Any:
        loaded = models.lora_requests.get(request.lora_name)
        answer = await forget(request)
        if not isinstance(answer, ErrorResponse):
            try:
                await unload(request.lora_name)
            except BaseException:  # cancellation included: workers may still have the adapter
                models.lora_requests.setdefault(request.lora_name, loaded)
                raise
        return answer

    models.unload_lora_adapter = unload_everywhere


# Streams

#: The server-sent events of one response.
Events = AsyncGenerator[str, None]

#: Makes them of a request and its results; the last argument is vLLM's own generator, a function of results.
MakeEvents = Callable[[Any, AsyncIterator[Any], Callable[[AsyncIterator[Any]], Events]], Events]


def make_streams_by(state: Any, *, chat: MakeEvents, completions: MakeEvents) -> None:
    """Have the events of streams of an app made by these functions, unless the app's flags add more than a result's
    text to each event, or log each: parsers of tools or reasoning, usage in every event. Results of completions, of one
    prompt only, are pairs of its number and its output."""
    serving = state.openai_serving_chat
    if not (serving.parser_cls or serving.enable_log_outputs or serving.enable_force_include_usage):
        vllms = serving.chat_completion_stream_generator
        serving.chat_completion_stream_generator = _making(chat, vllms, results_at=1)
    serving = state.openai_serving_completion
    if not serving.enable_force_include_usage:
        vllms = serving.completion_stream_generator
        serving.completion_stream_generator = _making(completions, vllms, results_at=2)


def _making(make: MakeEvents, vllms: Callable[..., Events], *, results_at: int) -> Callable[..., Events]:
    def events(*args: Any, **kwargs: Any) -> Events:
        def of(results: AsyncIterator[Any]) -> Events:
            return vllms(*args[:results_at], results, *args[results_at + 1 :], **kwargs)

        results = args[results_at]
        return of(results) if kwargs.get("num_prompts", 1) > 1 else make(args[0], results, of)

    return events


# Uploaded speech

#: Returns the clips and the duration of an upload.
ToClips = Callable[[bytes], Awaitable[Any]]


def decode_speech_by(state: Any, wrap: Callable[[ToClips, float], ToClips]) -> None:
    """Replace, in the handlers of an app's speech endpoints, the step that decodes an upload and cuts it into clips by
    `wrap(step, sample_rate)`."""
    for speech in (state.openai_serving_transcription, state.openai_serving_translation):
        step = speech._decode_and_chunk_speech_async
        speech._decode_and_chunk_speech_async = wrap(step, speech.asr_config.sample_rate)


# Pooling endpoints: embeddings, pooling, classification, scores

#: Members of the app's state; each is None if the model has no such task.
_SERVINGS = ("serving_pooling", "serving_embedding", "serving_classification", "serving_scores")


def change_pooling(
    state: State,
    renderer: object,
    *,
    build: Callable[[Callable[[Any], Any]], Callable[[Any], Any]],
    respond: Callable[[Callable[..., Any]], Callable[..., Awaitable[Any]]],
    render: Callable[[Callable[..., Any]], Callable[..., Awaitable[Any]]],
) -> None:
    """Change the app's pooling endpoints. `build` wraps the last step of a response, which gets the context of a
    request; `respond` the whole of it (io_processor, context), as a coroutine; `render` the method that renders a
    prompt with this `renderer`, likewise."""
    for endpoint in (found for name in _SERVINGS if (found := getattr(state, name)) is not None):
        endpoint._build_response = build(endpoint._build_response)
        endpoint._postprocessing_async = respond(endpoint._postprocessing)
        own = vars(endpoint)  # /pooling has an IO processor for each task
        for io_processor in own["io_processors"].values() if "io_processors" in own else [own["io_processor"]]:
            rendering = copy.copy(io_processor)
            rendering.renderer = renderer
            io_processor.render_async = render(rendering.render)


def rendering_executor(renderer: BaseRenderer) -> Executor:
    """Return the executor of chat templates and tokenizer."""
    executor: Executor = renderer._executor
    return executor
