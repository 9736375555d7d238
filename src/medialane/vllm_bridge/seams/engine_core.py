"""EngineCore, in its own process or in its parent before the fork."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.multimodal.cache import MultiModalCacheMissError
from vllm.v1.engine import core

from medialane.vllm_bridge.seams.engine import EngineCoreRequest, ItemDecoder


def change(
    decoder: type[ItemDecoder],
    *,
    before_add: Callable[[EngineCoreRequest], None],
    utilities: Mapping[str, Callable[..., Any]],
) -> None:
    """Make EngineCore decode requests with `decoder` and serve calls of `utilities`. Idempotent.

    `before_add` gets each request, in the input thread; what it raises fails only that request.
    """
    if core.MsgpackDecoder is decoder:
        return
    core.MsgpackDecoder = decoder
    inner = core.EngineCore.preprocess_add_request

    def preprocess_add_request(self: Any, request: EngineCoreRequest) -> Any:
        try:
            before_add(request)
            preprocessed = inner(self, request)
        except Exception as error:
            if request.pooling_params is None:
                raise
            # vLLM's front end fails at any other error of a pooling request, for which it expects a tensor.
            raise MultiModalCacheMissError([request.request_id]) from error
        # The input thread's frame keeps this message alive until the next one; its items would pin their arena.
        request.mm_features = None
        return preprocessed

    core.EngineCore.preprocess_add_request = preprocess_add_request
    for name, utility in utilities.items():
        setattr(core.EngineCore, name, utility)
