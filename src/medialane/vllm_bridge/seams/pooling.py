"""vLLM's pooling endpoints: embeddings, pooling, classification, scores."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from typing import Any

from starlette.datastructures import State
from vllm.entrypoints.pooling.base.io_processor import PoolingIOProcessor
from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest
from vllm.plugins.io_processors import has_io_processor
from vllm.renderers import BaseRenderer

__all__ = [
    "PoolingIOProcessor",
    "RerankRequest",
    "build_by",
    "has_io_processor",
    "io_processors_of",
    "postprocess_by",
    "render_by",
    "rendering_executor",
    "rendering_with",
    "servings_of",
]

#: Members of the app's state; each is None if the model has no such task.
_SERVINGS = ("serving_pooling", "serving_embedding", "serving_classification", "serving_scores")

#: Builds the response: (io_processor, context).
Postprocess = Callable[..., Any]


def servings_of(state: State) -> list[PoolingBaseServing]:
    """Return the app's pooling endpoints."""
    return [serving for name in _SERVINGS if (serving := getattr(state, name)) is not None]


def io_processors_of(serving: PoolingBaseServing) -> Iterator[PoolingIOProcessor]:
    """Yield the objects that render the endpoint's prompts: /pooling has one for each task."""
    attributes = vars(serving)
    yield from attributes["io_processors"].values() if "io_processors" in attributes else [attributes["io_processor"]]


def postprocess_by(serving: PoolingBaseServing, wrap: Callable[[Postprocess], Callable[..., Awaitable[Any]]]) -> None:
    """Make the endpoint build its responses by `wrap(postprocess)`."""
    serving._postprocessing_async = wrap(serving._postprocessing)


def build_by(serving: PoolingBaseServing, wrap: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> None:
    """Replace the last step of `postprocess`, which gets the context of a request, by `wrap(step)`."""
    serving._build_response = wrap(serving._build_response)


def rendering_with(io_processor: PoolingIOProcessor, renderer: object) -> Callable[..., Any]:
    """Return the method that renders a prompt, for another renderer."""
    own = copy.copy(io_processor)
    own.renderer = renderer
    render: Callable[..., Any] = own.render
    return render


def render_by(io_processor: PoolingIOProcessor, render: Callable[..., Awaitable[Any]]) -> None:
    """Make the endpoint render its prompts by `render`."""
    io_processor.render_async = render


def rendering_executor(renderer: BaseRenderer) -> Executor:
    """Return the executor of chat templates and tokenizer."""
    executor: Executor = renderer._executor
    return executor
