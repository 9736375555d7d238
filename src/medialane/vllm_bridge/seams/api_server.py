"""vLLM's OpenAI app and HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.dependencies import utils
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher
from vllm.entrypoints.openai.chat_completion import serving
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.logger import configure_logging_from_args


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


#: Validates one of FastAPI's bodies: fields, the parsed body, whether fields are embedded.
_Validate = Callable[[Any, Any, bool], Coroutine[Any, Any, Any]]


def validate_in_thread(is_large: Callable[[object], bool], executor: ThreadPoolExecutor) -> None:
    """Make FastAPI validate large parsed JSON bodies in `executor` from now on, instead of on the event loop."""
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
        return loop.run_in_executor(executor, validated, body_fields, received_body, embed_body_fields)

    in_thread.__wrapped__ = validate  # type: ignore[attr-defined]
    utils.request_body_to_args = in_thread  # type: ignore[assignment]


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
            except BaseException:
                models.lora_requests.setdefault(request.lora_name, loaded)
                raise
        return answer

    models.unload_lora_adapter = unload_everywhere
