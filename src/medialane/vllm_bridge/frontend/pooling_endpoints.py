"""Changes to vLLM's pooling endpoints (embeddings, pooling, classification, scores), which differ from the others.

*Rendering.* They render prompts with the renderer's blocking methods in its only thread, media included. Here the same
code runs with a renderer that returns, instead of a prompt, the asynchronous call of the same name: the template and
the tokenizer run in the thread, and the gateway prepares the media of all prompts at once.

*Responses* may have many MB, so they are built in a thread of their own: vLLM uses the renderer's, and short requests
are rendered on the event loop (`install_inline_rendering`). A response of the reranker repeats its documents: the
media URLs in them become the client's again.

Writes the floats of a pooling response as JSON in small pieces.

Python's encoder writes a whole document in one call, during which no other thread runs, nor the event loop: 0.7 s for a
million floats, such as the embeddings of all tokens of a page. So vLLM builds the response for empty tensors, and their
floats are inserted in its text, which is the same then.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from starlette.datastructures import State
from starlette.responses import JSONResponse, Response
from vllm.config import VllmConfig
from vllm.outputs import PoolingOutput, PoolingRequestOutput
from vllm.renderers import BaseRenderer

from medialane.types.errors import StartupFailed
from medialane.vllm_bridge.frontend.request_backend import MediaReferences
from medialane.vllm_bridge.seams.api_server import (
    PoolingIOProcessor,
    RerankRequest,
    change_pooling,
    has_io_processor,
    rendering_executor,
)

#: Encoded in 3 ms.
PIECE_FLOATS = 4096

#: An empty tensor in the text of a response, without its brackets. No JSON string contains unescaped quotes.
_MEMBERS = (b'"embedding":', b'"data":')

Build = Callable[[Any], Response]


def built_in_pieces(build: Build) -> Build:
    """Return a function that gives the same responses as vLLM's `build`, which gets the context of a request."""

    def built(context: Any) -> Response:
        outputs: list[PoolingRequestOutput] = context.final_res_batch
        is_float = getattr(context.request, "encoding_format", None) == "float"
        if not is_float or sum(output.outputs.data.numel() for output in outputs) <= PIECE_FLOATS:
            return build(context)
        context.final_res_batch = list(map(_emptied, outputs))
        response = build(context)
        context.final_res_batch = outputs
        body = _filled(bytes(response.body), outputs) if type(response) is JSONResponse else None
        return build(context) if body is None else Response(body, media_type="application/json")

    return built


def _emptied(output: PoolingRequestOutput) -> PoolingRequestOutput:
    return PoolingRequestOutput(
        output.request_id,
        PoolingOutput(torch.empty(0)),
        output.prompt_token_ids,
        output.num_cached_tokens,
        output.finished,
    )


def _filled(body: bytes, outputs: Sequence[PoolingRequestOutput]) -> bytes | None:
    """Return the body with the floats of `outputs` in place of its empty lists; None if it has not one for each."""
    for member in _MEMBERS:
        first, *rest = body.split(member + b"[]")
        if len(rest) == len(outputs):
            pieces = [first]
            for output, after in zip(outputs, rest, strict=True):
                pieces += [member, *_json(output.outputs.data), after]
            return b"".join(pieces)
    return None


def _json(data: torch.Tensor) -> Iterator[bytes]:
    """Yield the nested lists of a tensor of at least one dimension."""
    yield b"["
    if data.ndim > 1:
        for number, row in enumerate(data):
            yield b"," if number else b""
            yield from _json(row)
    else:
        for start in range(0, len(data), PIECE_FLOATS):
            piece = json.dumps(data[start : start + PIECE_FLOATS].tolist(), separators=(",", ":"), allow_nan=False)
            yield (("," if start else "") + piece[1:-1]).encode()
    yield b"]"


#: Returns a rendered prompt.
Render = Callable[[], Awaitable[Any]]

#: One thread: several would compete with the event loop for the GIL.
_RESPONSES = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pooling-response")


def check_supported(config: VllmConfig) -> None:
    """Raise StartupFailed for a plugin that makes prompts itself: it may fetch media by itself, without our checks."""
    plugin = config.model_config.io_processor_plugin
    if has_io_processor(config, plugin):
        raise StartupFailed("--io-processor-plugin is not supported: a plugin fetches media in the gateway, unchecked")


def install(state: State, renderer: BaseRenderer, backend: MediaReferences) -> None:
    """Change the endpoints of the app with this state."""
    change_pooling(
        state,
        _DeferringRenderer(renderer),
        build=built_in_pieces,
        respond=partial(_responding, backend),
        render=partial(_rendering, rendering_executor(renderer)),
    )


class _DeferringRenderer:
    """Stands for a renderer in vLLM's `render`: a prompt that it returns is a `Render`."""

    def __init__(self, renderer: BaseRenderer) -> None:
        self._renderer = renderer

    def render_chat(self, *args: Any, **kwargs: Any) -> tuple[list[None], list[Render]]:
        async def render() -> Any:
            _, (prompt,) = await self._renderer.render_chat_async(*args, **kwargs)
            return prompt

        return [None], [render]

    def render_cmpl(self, *args: Any, **kwargs: Any) -> list[Render]:
        async def render() -> Any:
            (prompt,) = await self._renderer.render_cmpl_async(*args, **kwargs)
            return prompt

        return [render]

    def process_for_engine(self, *args: Any, **kwargs: Any) -> Render:
        async def render() -> Any:
            return await self._renderer.process_for_engine_async(*args, **kwargs)

        return render


def _rendering(executor: Executor, render: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Return the replacement for `render_async` of one of vLLM's IO processors, whose own method is `render`."""

    async def render_async(params: Mapping[str, Any]) -> Any:
        # The thread needs the request's scope, to resolve the media of a query or document.
        in_context = contextvars.copy_context().run
        rendered = await asyncio.get_running_loop().run_in_executor(executor, in_context, render, params)
        return {**rendered, "prompts": await rendered["prompts"]()}

    return render_async


def _responding(backend: MediaReferences, postprocess: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Return the replacement for the method of one of vLLM's endpoints that builds responses, by `postprocess`."""

    def build(io_processor: PoolingIOProcessor, context: Any) -> Any:
        request = context.request
        if isinstance(request, RerankRequest):
            documents = request.documents if isinstance(request.documents, list) else [request.documents]
            original = [_original(document, backend) for document in documents]
            context.request = request.model_copy(update={"documents": original})
        return postprocess(io_processor, context)

    async def respond(io_processor: PoolingIOProcessor, context: Any) -> Any:
        in_context = contextvars.copy_context().run
        return await asyncio.get_running_loop().run_in_executor(_RESPONSES, in_context, build, io_processor, context)

    return respond


def _original(document: Any, backend: MediaReferences) -> Any:
    """Return a document with the client's media URLs."""
    if isinstance(document, str):
        return document
    return {**document, "content": [_original_part(part, backend) for part in document.get("content", ())]}


def _original_part(part: Mapping[str, Any], backend: MediaReferences) -> Mapping[str, Any]:
    original = dict(part)
    for name, value in part.items():
        if isinstance(value, Mapping) and isinstance(url := value.get("url"), str):
            original[name] = {**value, "url": backend.original_url(url)}
    return original
