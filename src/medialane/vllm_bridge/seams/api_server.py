"""vLLM's OpenAI app and HTTP server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher
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
