"""vLLM's render and generate endpoints, and the form in which they send processed items."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from copy import copy
from typing import Any

import torch
from msgspec import msgpack
from starlette.datastructures import State
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.render.serving import ServingRender
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.serial_utils import CUSTOM_TYPE_RAW_VIEW, MsgpackEncoder
from vllm.v1.utils import tensor_data

#: The requests of the render endpoints.
RENDERED = (ChatCompletionRequest, CompletionRequest, ResponsesRequest, AnthropicMessagesRequest)

#: The end of the paths of the render endpoints.
RENDER = "/render"

#: Tensors of at least this size are not copied into an encoded item.
_LARGE_BYTES = 16 * 1024

Buffer = bytes | memoryview


def accept_payloads(payloads: Any, description: str) -> None:
    """Make the field `mm_payload` of requests be one of the Literal `payloads`. Call it before the app's routes are
    built."""
    for request in RENDERED:
        field = request.model_fields["mm_payload"]
        if field.annotation != payloads:
            field.annotation = payloads
            field.description = description
            request.model_rebuild(force=True)


class RenderServing(ServingRender):  # type: ignore[misc]  # vllm is not typed
    """vLLM's render endpoints, changed by the answer to the current request (`frontend.render.RenderAnswer`)."""

    def __init__(self, own: ServingRender, current: Callable[[], Any]) -> None:
        super().__init__(
            own.models, own.online_renderer, request_logger=own.request_logger, tool_server=own.tool_server
        )
        self.current = current
        if self.model_config.supports_multimodal_inputs:  # otherwise made for the first answer, in 0.1 s
            self._placeholder_metadata_parser = self.online_renderer.renderer.get_mm_processor().info.data_parser

    async def render_chat_request(self, request: ChatCompletionRequest, raw_request: Any = None) -> Any:
        request.mm_payload = self.current().choose(request)
        return await self.shortened(await super().render_chat_request(request, raw_request))

    async def render_messages_request(self, request: AnthropicMessagesRequest, raw_request: Any = None) -> Any:
        request.mm_payload = self.current().choose(request)  # vLLM hands it to `render_chat_request`
        return await super().render_messages_request(request, raw_request)

    async def render_completion_request(self, request: CompletionRequest, raw_request: Any = None) -> Any:
        request.mm_payload = self.current().choose(request)
        return await self.shortened(await super().render_completion_request(request, raw_request))

    async def render_responses_request(self, request: ResponsesRequest) -> Any:
        request.mm_payload = self.current().choose(request)
        return await self.shortened(await super().render_responses_request(request))

    def _extract_mm_features(self, engine_input: Mapping[str, Any], *, mm_payload: str = "tensors") -> Any:
        features = super()._extract_mm_features(engine_input, mm_payload="none")
        if features is not None:
            self.current().fill(features, engine_input, self._placeholder_metadata_fields)
        return features

    async def shortened(self, rendered: Any) -> Any:
        """Return the requests, or the error."""
        for each in rendered if isinstance(rendered, list) else [rendered]:
            if isinstance(each, GenerateRequest):
                await asyncio.sleep(0)  # vLLM has taken milliseconds for a long prompt
                self.current().shorten(each)
        return rendered


def render_by(state: State, current: Callable[[], Any]) -> None:
    """Change the render endpoints of an app with this state: `current` returns the answer to the current request, which
    chooses its payload (`choose`), adds that to the features of a prompt (`fill`) and may `shorten` the rest."""
    state.serving_render = RenderServing(state.serving_render, current)


def metadata_of(item: MultiModalKwargsItem, declared: Collection[str]) -> MultiModalKwargsItem:
    """Return the fields that prefill needs after an embedding was transferred: these, and those kept on the CPU."""
    return MultiModalKwargsItem(
        {name: elem for name, elem in item.items() if elem.field.keep_on_cpu or name in declared}
    )


def encoded_item(item: MultiModalKwargsItem) -> list[Buffer]:
    """Return the pieces of what vLLM's `mm_serde.encode_mm_kwargs_item` encodes in base64. Large tensors are not
    copied: those pieces are valid as long as the item's."""
    return _PiecesEncoder().pieces(item)


class _PiecesEncoder(MsgpackEncoder):  # type: ignore[misc]  # vllm is not typed
    """Encodes a random mark in place of each large tensor, and splits the result there."""

    def __init__(self) -> None:
        super().__init__(size_threshold=2**62)
        self.large: list[tuple[bytes, memoryview]] = []

    def pieces(self, item: MultiModalKwargsItem) -> list[Buffer]:
        (rest,) = self.encode(item)
        pieces: list[Buffer] = []
        for mark, data in self.large:
            before, rest = rest.split(mark)
            pieces += [before, _raw_header(data.nbytes), data]
        return [*pieces, rest]

    def _encode_tensor(self, obj: torch.Tensor) -> Any:
        if obj.nbytes < _LARGE_BYTES:
            return super()._encode_tensor(obj)
        mark = msgpack.Ext(CUSTOM_TYPE_RAW_VIEW, secrets.token_bytes(16))
        self.large.append((msgpack.encode(mark), tensor_data(obj)))
        return str(obj.dtype).removeprefix("torch."), obj.shape, mark


def _raw_header(num_bytes: int) -> bytes:
    """Return the header of a msgpack extension with this much data, for a large tensor."""
    kind = bytes([CUSTOM_TYPE_RAW_VIEW])
    if num_bytes < 1 << 16:
        return b"\xc8" + num_bytes.to_bytes(2, "big") + kind
    return b"\xc9" + num_bytes.to_bytes(4, "big") + kind


#: The code of the extension in which a tensor's bytes are sent.
RAW_VIEW: int = CUSTOM_TYPE_RAW_VIEW

#: Returns the engine's input of a request that has features.
MakeInput = Callable[[GenerateRequest], Awaitable[Any]]


class GenerateServing(ServingTokens):  # type: ignore[misc]  # vllm is not typed
    """vLLM's generate endpoint, in which `make_input` makes the engine's input of requests with features."""

    def __init__(self, own: ServingTokens, make_input: MakeInput) -> None:
        self.__dict__.update(own.__dict__)
        self.make_input = make_input

    async def serve_tokens(self, request: GenerateRequest, raw_request: Any = None) -> Any:
        if request.features is None:
            return await super().serve_tokens(request, raw_request)
        if (error := await self._check_model(request)) is not None:
            return error
        made = await self.make_input(request)
        request.features = None  # as a prompt of token ids, which vLLM has `online_renderer` render
        answering = copy(self)
        answering.online_renderer = _Rendered(made)
        return await ServingTokens.serve_tokens(answering, request, raw_request)


class _Rendered:
    """Renders one prompt, which has been rendered."""

    def __init__(self, engine_input: Any) -> None:
        self.engine_input = engine_input

    async def preprocess_completion(self, *_args: Any, **_kwargs: Any) -> list[Any]:
        return [self.engine_input]


def generate_by(state: State, make_input: MakeInput) -> None:
    """Serve the generate endpoint of an app with this state with this hook, if the app has it."""
    if state.serving_tokens is not None:
        state.serving_tokens = GenerateServing(state.serving_tokens, make_input)
